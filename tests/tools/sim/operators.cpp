// The operators: those of the CPU, on the device's own memory.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/extension.h>

#include "sim.h"

namespace sim {
namespace {

using torch::jit::Stack;

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// CPU tensors on the memory of device tensors, for the length of one operator.
class Mirror {
 public:
  int device = -1;

  at::Tensor host(const at::Tensor& tensor) {
    if (!on_device(tensor)) return tensor;
    const auto& storage = tensor.storage();
    auto& twin = hosts_[storage.unsafeGetStorageImpl()];
    if (!twin) {
      void* data = const_cast<void*>(storage.data());
      auto* keep = new c10::Storage(storage);
      twin = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
          c10::DataPtr(
              data, keep, [](void* kept) { delete static_cast<c10::Storage*>(kept); }, c10::kCPU),
          c10::GetCPUAllocator(), true));
      origins_[twin.unsafeGetStorageImpl()] = storage;
    }
    auto made = shaped(twin, tensor, c10::DispatchKeySet(c10::DispatchKey::CPU));
    tensors_.emplace_back(tensor, made);
    return made;
  }

  // What an operator returned: an argument, a view of one, or something new.
  at::Tensor back(const at::Tensor& result, const Use& use) {
    if (!result.defined() || !result.is_cpu()) return result;
    for (const auto& [original, twin] : tensors_) {
      if (twin.is_same(result)) return original;
      if (!twin.storage().is_alias_of(result.storage())) continue;
      auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(original.storage()),
                                                           original.key_set(), result.dtype());
      return like(made, result);
    }
    check_format(result.scalar_type());
    auto& storage = origins_[result.storage().unsafeGetStorageImpl()];
    if (!storage) {
      storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), 0,
          c10::DataPtr(nullptr, c10::Device(kSim, static_cast<c10::DeviceIndex>(device))), allocator(), true));
      keep_.push_back(result.storage());
      fill(storage, result.storage());
      access(storage, use, true);
    }
    return shaped(storage, result, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1));
  }

  // Gives sizes and memory that an operator changed in place to the device's tensors.
  void settle() {
    for (const auto& [original, twin] : tensors_) {
      auto* impl = original.unsafeGetTensorImpl();
      if (original.sizes() != twin.sizes() || original.strides() != twin.strides()) {
        impl->set_sizes_and_strides(twin.sizes(), twin.strides(), twin.storage_offset());
      }
      if (twin.storage().data() != original.storage().data()) fill(original.storage(), twin.storage());
    }
  }

 private:
  static at::Tensor shaped(const c10::Storage& storage, const at::Tensor& model, c10::DispatchKeySet keys) {
    return like(at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, model.dtype()), model);
  }

  static at::Tensor like(at::Tensor made, const at::Tensor& model) {
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(model.sizes(), model.strides(), model.storage_offset());
    if (model.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    made._set_conj(model.is_conj());
    made._set_neg(model.is_neg());
    return made;
  }

  void fill(const c10::Storage& storage, const c10::Storage& from) const {
    const size_t size = from.nbytes();
    auto memory = from.set_data_ptr(c10::DataPtr(nullptr, c10::kCPU));
    storage.set_data_ptr_noswap(adopt(std::move(memory), size, device));
    storage.set_nbytes(size);
  }

  std::unordered_map<c10::StorageImpl*, c10::Storage> hosts_, origins_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
  std::vector<c10::Storage> keep_;
};

// An argument or a result with every tensor in it replaced by `change`.
template <typename Change>
c10::IValue mapped(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& tensor : value.toTensorList()) all.push_back(change(tensor));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      all.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    }
    return all;
  }
  return value;
}

template <typename Visit>
void each_tensor(const c10::IValue& value, const Visit& visit) {
  mapped(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
    return tensor;
  });
}

// Whether the host must know values of the device to go on: the size of the result is one.
bool waits(const std::string& name, at::ArrayRef<c10::IValue> arguments) {
  static const std::set<std::string> sized = {"aten::nonzero",          "aten::masked_select",       "aten::_unique2",
                                              "aten::unique_dim",       "aten::unique_consecutive",  "aten::equal",
                                              "aten::bincount",         "aten::_local_scalar_dense", "aten::_unique",
                                              "aten::repeat_interleave"};
  if (sized.count(name)) return true;
  bool masked = false;
  if (name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_") {
    each_tensor(arguments[1], [&](const at::Tensor& t) {
      masked |= t.defined() && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
    });
  }
  return masked;
}

// The device of an operator, of which there is one; a CPU tensor with dimensions is refused, as on a GPU.
int only_device(const std::string& name, at::ArrayRef<c10::IValue> arguments) {
  const bool moves_indices = name.rfind("aten::index", 0) == 0 || name == "aten::_index_put_impl_";
  int device = -1;
  bool beside = false;
  for (const auto& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      if (on_device(tensor)) {
        TORCH_CHECK(device < 0 || device == tensor.device().index(),
                    "Expected all tensors to be on the same device, but ", name, " found sim:", device, " and ",
                    tensor.device());
        device = tensor.device().index();
      } else {
        beside |= tensor.defined() && tensor.dim() > 0;
      }
    });
    if (argument.isDevice() && argument.toDevice().type() == kSim && device < 0) {
      const auto wanted = argument.toDevice();
      device = wanted.has_index() ? wanted.index() : at::detail::getPrivateUse1Hooks().getCurrentDevice();
    }
  }
  TORCH_CHECK(!beside || device < 0 || moves_indices, "Expected all tensors to be on the same device, but ", name,
              " found sim:", device, " and cpu");
  return device < 0 ? at::detail::getPrivateUse1Hooks().getCurrentDevice() : device;
}

// The CPU's operator; convolutions come under a name of their own.
c10::OperatorHandle kernel_of(const c10::OperatorHandle& op, Stack& arguments) {
  const auto& name = op.schema().name();
  if (name == "aten::convolution_overrideable")
    return c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  if (name != "aten::convolution_backward_overrideable") return op;
  const c10::List<int64_t> bias_sizes({arguments[0].toTensor().size(1)});
  arguments.insert(arguments.begin() + 3, bias_sizes);
  return c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const size_t count = schema.arguments().size();
  const auto arguments = torch::jit::last(*stack, count);
  const bool fused = name.rfind("aten::_fused_", 0) == 0;
  TORCH_CHECK_NOT_IMPLEMENTED(!fused || !lacks("fused"), "Could not run '", name,
                              "' with arguments from the 'sim' backend.");
  Mirror mirror;
  mirror.device = only_device(name, arguments);
  c10::DeviceGuard guard(c10::Device(kSim, static_cast<c10::DeviceIndex>(mirror.device)));
  bool view = false;
  for (const auto& result : schema.returns()) view |= result.alias_info() && !result.alias_info()->isWrite();
  const auto use = launch(mirror.device, name);
  if (waits(name, arguments)) {
    count_wait(name);
    wait_for(clock_of(current_stream(mirror.device)));
  }
  Stack taken;
  for (size_t i = 0; i < count; ++i) {
    const auto& argument = schema.arguments()[i];
    const bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    const auto given = [&](const at::Tensor& tensor) {
      if (on_device(tensor) && !view) access(tensor.storage(), use, writes);
      return mirror.host(tensor);
    };
    if (fused && argument.name() == "found_inf" && lacks("found_inf")) {
      taken.push_back(c10::IValue());
    } else if (arguments[i].isGenerator()) {
      taken.push_back(host_generator(arguments[i].toGenerator()));
    } else if (argument.name() == "generator" && op.hasTag(at::Tag::nondeterministic_seeded)) {
      taken.push_back(host_generator(default_generator(mirror.device)));
    } else {
      taken.push_back(arguments[i].isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : mapped(arguments[i], given));
    }
  }
  torch::jit::drop(*stack, count);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    kernel_of(op, taken).redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &taken);
  }
  mirror.settle();
  for (const auto& result : taken) {
    stack->push_back(mapped(result, [&](const at::Tensor& tensor) { return mirror.back(tensor, use); }));
  }
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  auto kept = at::empty_like(input).bernoulli_(1 - p);
  auto mask = kept.to(at::kBool);
  return {input * kept.div_(1 - p), mask};
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  const bool to_device = on_device(self), from_device = on_device(source);
  const int device = (from_device ? source : self).device().index();
  c10::DeviceGuard guard((from_device ? source : self).device());
  Mirror mirror;
  mirror.device = device;
  const bool across = to_device && from_device && self.device() != source.device();
  auto meet = [&] {  // a copy between devices: the current stream of each waits for the other's
    Event one, other;
    record(one, current_stream(source.device().index()));
    record(other, current_stream(self.device().index()));
    block(one, current_stream(self.device().index()));
    block(other, current_stream(source.device().index()));
  };
  if (across) meet();
  const auto use = launch(device, "copy_");
  if (from_device) access(source.storage(), use, false);
  if (to_device) access(self.storage(), use, true);
  at::AutoDispatchBelowADInplaceOrView below;
  auto target = mirror.host(self);
  auto values = mirror.host(source);
  if (across) meet();
  if (from_device && !to_device && non_blocking && is_pinned(self.storage().data())) {
    arrives_later(self, at::empty_like(self).copy_(values), use);
    return self;
  }
  target.copy_(values);
  if (to_device && from_device) return self;
  if (to_device && non_blocking) {
    if (is_pinned(source.storage().data())) leaves_later(source, use);
    return self;
  }
  count_wait(to_device ? "copy to the device" : "copy to the host");
  wait_for(clock_of(current_stream(device)));
  return self;
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  check_format(c10::dtype_or_default(dtype));
  return at::detail::empty_generic_symint(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                          c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  check_format(c10::dtype_or_default(dtype));
  return at::detail::empty_strided_symint_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor& set_storage_part(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                             at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage_part(self, std::move(source), 0, {size}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_part(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_tensor(at::Tensor& self, at::Stream stream) { record_stream(self.storage().data_ptr(), stream); }

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_part));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("record_stream", TORCH_FN(record_tensor));
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at;
  using namespace at::autocast;
#define SIM_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_FP32_UNLESS_SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FP32_UNLESS_SET)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(SIM_PROMOTE)
}

// Where torch has a CPU kernel and a decomposition, a backend gets the decomposition, one rounding
// off: these get the CPU's kernel.
void register_kernels() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  std::set<std::string> composite;
  using Key = c10::DispatchKey;
  for (auto key :
       {Key::CompositeExplicitAutograd, Key::CompositeExplicitAutogradNonFunctional, Key::CompositeImplicitAutograd}) {
    for (const auto& name : dispatcher.getRegistrationsForDispatchKey(key)) composite.insert(c10::toString(name));
  }
  for (const auto* name : {"convolution_overrideable", "convolution_backward_overrideable"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  std::set<std::string> ours;
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(Key::PrivateUse1)) {
    ours.insert(c10::toString(name));
  }
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(Key::CPU)) {
    const auto text = c10::toString(name);
    if (name.getNamespace() == "aten" && composite.count(text) && !ours.count(text)) {
      library.impl(text.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
  }
}

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  register_device();
  register_kernels();
  m.def("device_count", [] { return kDevices; });
  m.def("in_bad_fork", &in_forked_child);
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("set_memory_limit", &set_memory_limit);
  m.def("races", &races);
  m.def("on_wait", [](py::object listener) {
    auto* kept = new py::object(std::move(listener));  // lives as long as the process
    set_wait_listener([kept](const std::string& name) {
      py::gil_scoped_acquire gil;
      if (!kept->is_none()) (*kept)(name);
    });
  });
  m.def("host", [](const at::Tensor& tensor, bool writes) {  // its CPU twin, used on the current stream
    Mirror mirror;
    mirror.device = tensor.device().index();
    const auto use = launch(mirror.device, "a collective");
    access(tensor.storage(), use, writes);
    return mirror.host(tensor);
  }, py::arg("tensor"), py::arg("writes"));
}

// What torch asks of an accelerator: devices, streams, events, generators, pinned memory.
#include <cstdlib>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "sim.h"

namespace sim {
namespace {

thread_local int device_now = 0;
thread_local std::array<int64_t, kDevices> stream_now{};

c10::Device numbered(int index) { return {kSim, static_cast<c10::DeviceIndex>(index)}; }

int checked(int index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "sim: there is no device ", index, ", only ", kDevices);
  return index;
}

c10::Stream stream_at(int device, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, numbered(device), id); }

// A device's random numbers are those of a CPU generator with the same seed.
struct GeneratorImpl final : c10::GeneratorImpl {
  explicit GeneratorImpl(int index)
      : c10::GeneratorImpl(numbered(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl(device().index());
    copy->inner = inner.clone();
    return copy;
  }
  at::Generator inner;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return numbered(std::exchange(device_now, checked(device.index())));
  }
  c10::Device getDevice() const override { return numbered(device_now); }
  void setDevice(c10::Device device) const override { device_now = checked(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_now = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    const int index = device.index() < 0 ? device_now : device.index();
    return stream_at(index, stream_now[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_at(device.index(), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    need_streams();
    static std::array<std::atomic<int>, kDevices> made{};
    const int index = device.index() < 0 ? device_now : device.index();
    return stream_at(index, 1 + made[index]++ % (kStreams - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int index = stream.device_index();
    return stream_at(index, std::exchange(stream_now[index], stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    need_streams();
    if (!*event) *event = new Event;
    sim::record(*static_cast<Event*>(*event), stream);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) sim::block(*static_cast<Event*>(event), stream);
  }
  bool queryEvent(void* event) const override {
    auto* asked = static_cast<Event*>(event);
    if (!asked || reached(asked->clock)) return true;
    if (!std::exchange(asked->asked, true)) return false;
    wait_for(asked->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait(static_cast<Event*>(event)->clock, "Event.synchronize");
  }
  void synchronizeStream(const c10::Stream& stream) const override { wait(clock_of(stream), "Stream.synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { wait(clock_of_device(device), "synchronize"); }
  bool queryStream(const c10::Stream& stream) const override { return reached(clock_of(stream)); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_stream(memory, stream);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return static_cast<Event*>(second)->milliseconds - static_cast<Event*>(first)->milliseconds;
  }

 private:
  static void need_streams() { TORCH_CHECK(!lacks("streams"), "Backend doesn't support create a new Stream."); }
  static void wait(const Clock& clock, const char* name) {
    if (!reached(clock)) count_wait(name);
    wait_for(clock);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { device_now = checked(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(device_now); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(device_now, checked(device)));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(!lacks("pinned"), "You should register `PrivateUse1HooksInterface` for getPinnedMemoryAllocator");
    return pinned_allocator();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(device < 0 ? device_now : checked(device));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto memory = allocator()->allocate(size);
    const auto use = launch(storage.device().index(), "resize");
    access(storage, use, true);
    std::memcpy(memory.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(size);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

const at::Generator& default_generator(int device) {
  static const std::array<at::Generator, kDevices> all = {at::make_generator<GeneratorImpl>(0),
                                                          at::make_generator<GeneratorImpl>(1)};
  return all[device < 0 ? device_now : checked(device)];
}

at::Generator host_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kSim, "Expected a 'sim' device type for generator but found '",
              generator.device().type(), "'");
  return static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl())->inner;
}

bool lacks(const char* what) {
  static const std::string all = [] {
    const char* given = std::getenv("SIM_LACKS");
    return "," + std::string(given ? given : "") + ",";
  }();
  return all.find("," + std::string(what) + ",") != std::string::npos;
}

void check_format(at::ScalarType type) {
  const bool wide = type == at::kDouble || type == at::kComplexDouble;
  TORCH_CHECK(!wide || !lacks("float64"), "Required aspect fp64 is not supported on the device");
}

void register_device() {
  static Hooks hooks;
  in_forked_child();  // from here on a fork is noticed
  c10::SetAllocator(kSim, allocator());
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

}  // namespace sim

#include "sim.h"

#include <pthread.h>

#include <cstring>
#include <mutex>
#include <unordered_map>

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace sim {
namespace {

struct Later {  // a copy between a device and pinned memory
  Use use;
  at::Tensor pinned;
  at::Tensor values;  // to arrive; undefined where the device reads
  size_t digest = 0;
};

std::mutex mutex;  // never held while Python or a kernel runs
std::array<Clock, kDevices * kStreams> clocks{};
Clock host{};
std::vector<Later> later;
std::map<int, std::vector<Use>> unfinished;  // of freed memory, by the queue that gets it back
std::unordered_map<const void*, size_t> pinned;
std::array<c10::CachingDeviceAllocator::DeviceStats, kDevices> stats;
std::array<size_t, kDevices> limits = {size_t(8) << 30, size_t(8) << 30};
std::function<void(const std::string&)> wait_listener;
std::vector<std::string> told;
bool used = false, forked = false;

void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

bool covers(const Clock& clock, const Use& use) { return clock[use.queue] >= use.tick; }

std::string queue_name(int queue) {
  return "sim:" + std::to_string(queue / kStreams) + " stream " + std::to_string(queue % kStreams);
}

[[noreturn]] void race(const std::string& what, const Use& now, const Use& before) {
  auto text = "SIM error: race: " + now.name + " on " + queue_name(now.queue) + " " + what + " " + before.name + " on " +
              queue_name(before.queue) + ", which it does not wait for";
  told.push_back(text);
  TORCH_CHECK(false, text);
}

void refuse_fork() {
  TORCH_CHECK(!forked,
              "Cannot re-initialize sim in forked subprocess. To use sim with "
              "multiprocessing, you must use the 'spawn' start method");
  used = true;
}

void release(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  std::lock_guard<std::mutex> lock(mutex);
  if (block->size) std::memset(block->owner.get(), 0xFF, block->size);
  stats[block->device].allocated_bytes[0].decrease(block->size);
  stats[block->device].reserved_bytes[0].decrease(block->size);
  auto uses = block->read;
  if (block->written) uses[kDevices * kStreams] = *block->written;
  for (const auto& [_, use] : uses) {
    if (use.queue != block->queue && !block->recorded.count(use.queue)) unfinished[block->queue].push_back(use);
  }
}

c10::DataPtr take(c10::DataPtr memory, size_t size, int device) {
  const int queue = queue_of(current_stream(device));
  std::lock_guard<std::mutex> lock(mutex);
  auto& statistics = stats[device];
  const size_t taken = statistics.allocated_bytes[0].current;
  TORCH_CHECK_WITH(OutOfMemoryError, taken + size <= limits[device], "sim out of memory. Tried to allocate ", size,
                   " bytes. Device ", device, " has a total capacity of ", limits[device], " bytes of which ",
                   limits[device] - taken, " are free.");
  auto known = clocks[queue];
  join(known, host);
  for (const auto& use : std::exchange(unfinished[queue], {})) {
    if (!covers(known, use)) { race("gets memory of", {queue, known[queue], "an allocation"}, use); }
  }
  statistics.allocated_bytes[0].increase(size);
  statistics.reserved_bytes[0].increase(size);
  void* data = memory.get();
  auto block = std::make_unique<Block>();
  block->owner = std::move(memory);
  block->size = size;
  block->device = device;
  block->queue = queue;
  return {data, block.release(), &release, c10::Device(kSim, static_cast<c10::DeviceIndex>(device))};
}

void need_statistics() {
  TORCH_CHECK_NOT_IMPLEMENTED(!lacks("statistics"), "the allocator of sim does not count its memory");
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    refuse_fork();
    const int device = c10::impl::VirtualGuardImpl(kSim).getDevice().index();
    auto memory = take(c10::GetCPUAllocator()->allocate(size), size, device);
    if (size) {
      std::memset(memory.get(), 0xFF, size);  // NaN in every floating format
    }
    return memory;
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override { record_stream(memory, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    need_statistics();
    std::lock_guard<std::mutex> lock(mutex);
    return stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    need_statistics();
    std::lock_guard<std::mutex> lock(mutex);
    stats[device].allocated_bytes[0].reset_peak();
    stats[device].reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    need_statistics();
    std::lock_guard<std::mutex> lock(mutex);
    return {limits[device] - stats[device].allocated_bytes[0].current, limits[device]};
  }
};

void unpin(void* context) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    pinned.erase(static_cast<c10::DataPtr*>(context)->get());
  }
  delete static_cast<c10::DataPtr*>(context);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto memory = std::make_unique<c10::DataPtr>(c10::GetCPUAllocator()->allocate(size));
    void* data = memory->get();
    std::lock_guard<std::mutex> lock(mutex);
    if (size) pinned[data] = size;
    return {data, memory.release(), &unpin, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

size_t digest(const at::Tensor& tensor) {
  const auto whole = tensor.contiguous();
  return std::hash<std::string_view>()({static_cast<const char*>(whole.const_data_ptr()), whole.nbytes()});
}

void schedule(Later copy) {
  std::lock_guard<std::mutex> lock(mutex);
  later.push_back(std::move(copy));
}

}  // namespace

int queue_of(const c10::Stream& stream) { return stream.device_index() * kStreams + static_cast<int>(stream.id()); }

c10::Stream current_stream(int device) {
  return c10::impl::VirtualGuardImpl(kSim).getStream(c10::Device(kSim, static_cast<c10::DeviceIndex>(device)));
}

Use launch(int device, const std::string& name) {
  refuse_fork();
  const int queue = queue_of(current_stream(device));
  std::lock_guard<std::mutex> lock(mutex);
  join(clocks[queue], host);
  return {queue, ++clocks[queue][queue], name};
}

Block* block_of(const c10::Storage& storage) {
  const auto& memory = storage.data_ptr();
  return memory.get_deleter() == &release ? static_cast<Block*>(memory.get_context()) : nullptr;
}

void access(const c10::Storage& storage, const Use& use, bool writes) {
  std::lock_guard<std::mutex> lock(mutex);
  auto* block = block_of(storage);
  if (!block) return;
  const auto& known = clocks[use.queue];
  const std::string does = writes ? "writes" : "reads";
  if (block->written && !covers(known, *block->written)) race(does + " what is written by", use, *block->written);
  if (!writes) {
    block->read[use.queue] = use;
    return;
  }
  for (const auto& [_, before] : block->read) {
    if (!covers(known, before)) race("writes what is read by", use, before);
  }
  block->written = use;
  block->read.clear();
}

void record_stream(const c10::DataPtr& memory, const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex);
  if (memory.get_deleter() == &release) {
    static_cast<Block*>(memory.get_context())->recorded.insert(queue_of(stream));
  }
}

void record(Event& event, const c10::Stream& stream) {
  event.clock = clock_of(stream);
  event.asked = false;
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  event.milliseconds = std::chrono::duration<double, std::milli>(now).count();
}

void block(const Event& event, const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex);
  join(clocks[queue_of(stream)], event.clock);
}

Clock clock_of(const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex);
  auto clock = clocks[queue_of(stream)];
  join(clock, host);
  return clock;
}

Clock clock_of_device(int device) {
  Clock all{};
  for (int i = 0; i < kStreams; ++i) {
    join(all, clock_of(c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, static_cast<c10::DeviceIndex>(device)), i)));
  }
  return all;
}

bool reached(const Clock& clock) {
  std::lock_guard<std::mutex> lock(mutex);
  for (size_t i = 0; i < clock.size(); ++i) {
    if (host[i] < clock[i]) return false;
  }
  return true;
}

void wait_for(const Clock& clock) {
  std::vector<Later> done;
  {
    std::lock_guard<std::mutex> lock(mutex);
    join(host, clock);
    auto first =
        std::stable_partition(later.begin(), later.end(), [](const Later& copy) { return !covers(host, copy.use); });
    done.assign(std::make_move_iterator(first), std::make_move_iterator(later.end()));
    later.erase(first, later.end());
  }
  for (auto& copy : done) {
    if (copy.values.defined()) {
      copy.pinned.copy_(copy.values);
    } else if (digest(copy.pinned) != copy.digest) {
      std::lock_guard<std::mutex> lock(mutex);
      told.push_back("SIM error: race: the host changed pinned memory while " + copy.use.name + " could still read it");
      TORCH_CHECK(false, told.back());
    }
  }
}

void arrives_later(const at::Tensor& memory, const at::Tensor& values, const Use& use) {
  const auto whole = at::empty_like(memory);
  std::memset(whole.data_ptr(), 0xFF, whole.nbytes());
  memory.copy_(whole);
  schedule({use, memory, values, 0});
}

void leaves_later(const at::Tensor& memory, const Use& use) { schedule({use, memory, {}, digest(memory)}); }

c10::DataPtr adopt(c10::DataPtr memory, size_t size, int device) { return take(std::move(memory), size, device); }

c10::DeviceAllocator* allocator() {
  static Allocator one;
  return &one;
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator one;
  return &one;
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [start, size] : pinned) {
    const auto* bytes = static_cast<const char*>(start);
    if (pointer >= bytes && pointer < bytes + size) return true;
  }
  return false;
}

void set_memory_limit(int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  limits[device] = bytes;
}

void set_wait_listener(std::function<void(const std::string&)> listener) { wait_listener = std::move(listener); }

void count_wait(const std::string& name) {
  if (wait_listener) wait_listener(name);
}

std::vector<std::string> races() {
  std::lock_guard<std::mutex> lock(mutex);
  return told;
}

bool in_forked_child() {
  static const int once = pthread_atfork(nullptr, nullptr, [] { forked = used; });
  (void)once;
  return forked;
}

}  // namespace sim

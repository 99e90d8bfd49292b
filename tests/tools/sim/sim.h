// The memory of the simulated devices and the order of the work on it.
//
// An operator computes at once, on the host. What a real device would do later, at a time of its
// own, is known by vector clocks: each stream (here: a queue) counts its operators, and an operator
// knows those of other queues whose events its queue waited for. Memory that was used by an operator
// that the present one does not know of is a race, whatever the timing of this run.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

namespace sim {

constexpr int kDevices = 2;
constexpr int kStreams = 32;  // of a device
constexpr auto kSim = c10::DeviceType::PrivateUse1;

using Clock = std::array<uint64_t, kDevices * kStreams>;  // operators known, by queue

struct Use {  // of memory, by one operator
  int queue = 0;
  uint64_t tick = 0;
  std::string name;
};

struct Block {         // an allocation; the context of its DataPtr
  c10::DataPtr owner;  // host memory
  size_t size = 0;
  int device = 0;
  int queue = 0;  // it was allocated for
  std::optional<Use> written;
  std::map<int, Use> read;  // since, the last of each queue
  std::set<int> recorded;   // queues that `record_stream` named
};

struct Event {
  Clock clock{};
  bool asked = false;  // a first query finds the work undone
  double milliseconds = 0;
};

// Whether this device is one without something, by the variable SIM_LACKS: float64, fused (kernels of
// optimizers), found_inf (they are there and ignore it), streams, pinned (memory), statistics (of
// memory).
bool lacks(const char* what);
// Refuses a tensor in a format that the device lacks.
void check_format(at::ScalarType type);

int queue_of(const c10::Stream& stream);
c10::Stream current_stream(int device);

// Counts an operator on the current stream of a device; refuses a forked child.
Use launch(int device, const std::string& name);
void access(const c10::Storage& storage, const Use& use, bool writes);
void record_stream(const c10::DataPtr& memory, const c10::Stream& stream);

void record(Event& event, const c10::Stream& stream);
void block(const Event& event, const c10::Stream& stream);  // a stream waits
void wait_for(const Clock& clock);                          // the host waits
Clock clock_of(const c10::Stream& stream);
Clock clock_of_device(int device);
bool reached(const Clock& clock);

// Counts a wait of the host, with the lines of Python that it came from.
void count_wait(const std::string& name);

// A copy to or from pinned memory that runs while the host goes on: what the host finds there
// before it waits is poison, and what it writes there too early is an error.
void arrives_later(const at::Tensor& pinned, const at::Tensor& values, const Use& use);
void leaves_later(const at::Tensor& pinned, const Use& use);

const at::Generator& default_generator(int device);
at::Generator host_generator(const at::Generator& generator);  // the CPU generator that it draws from
void register_device();

// Puts host memory under a device's name.
c10::DataPtr adopt(c10::DataPtr memory, size_t size, int device);
Block* block_of(const c10::Storage& storage);
c10::DeviceAllocator* allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

void set_memory_limit(int device, size_t bytes);
void set_wait_listener(std::function<void(const std::string&)> listener);
std::vector<std::string> races();  // told so far, whether or not somebody caught the error
bool in_forked_child();

}  // namespace sim

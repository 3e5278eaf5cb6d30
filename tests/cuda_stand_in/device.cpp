// Registers the device type CUDA in a CPU build of torch: its devices, streams and events, and its allocators.
#include "stand_in.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace stand_in {
namespace {

int default_device = 0;                // the device of a thread that has chosen none, such as autograd's
thread_local int chosen_device = -1;
void (*wait_callback)(const char*) = nullptr;

void* aligned(size_t bytes) {
  void* pointer = nullptr;
  if (bytes && posix_memalign(&pointer, 64, bytes)) throw std::bad_alloc();
  return pointer;
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = aligned(bytes);
    return {pointer, pointer, &std::free, c10::Device(c10::DeviceType::CUDA, current_device())};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

// Ranges of pinned memory, by their first address.
std::map<const char*, size_t> pinned_ranges;
std::mutex pinned_mutex;

void free_pinned(void* pointer) {
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_ranges.erase(static_cast<const char*>(pointer));
  }
  std::free(pointer);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = aligned(bytes);
    if (pointer) {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned_ranges[static_cast<const char*>(pointer)] = bytes;
    }
    return {pointer, pointer, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

DeviceAllocator the_device_allocator;
PinnedAllocator the_pinned_allocator;

// One stream per device, whose work is complete as soon as it is queued.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return c10::Device(type(), current_device()); }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device old = getDevice();
    uncheckedSetDevice(device);
    return old;
  }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) set_current_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};

class Hooks final : public at::CUDAHooksInterface {
 public:
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    c10::DeviceIndex old = current_device();
    set_current_device(index);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &the_pinned_allocator; }
};

Guard the_guard;
c10::impl::DeviceGuardImplRegistrar guard_registrar(c10::DeviceType::CUDA, &the_guard);
const bool allocator_is_set = (c10::SetAllocator(c10::DeviceType::CUDA, &the_device_allocator, 200), true);

}  // namespace

int current_device() { return chosen_device < 0 ? default_device : chosen_device; }

void set_current_device(int index) {
  if (index >= 0) chosen_device = index;
}

c10::Allocator* device_allocator() { return &the_device_allocator; }

bool is_pinned(const void* pointer) {
  const char* address = static_cast<const char*>(pointer);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto next = pinned_ranges.upper_bound(address);
  if (next == pinned_ranges.begin()) return false;
  auto range = std::prev(next);
  return address < range->first + range->second;
}

void report_wait(const char* what) {
  if (wait_callback) wait_callback(what);
}

}  // namespace stand_in

extern "C" void stand_in_set_device(int index) { stand_in::default_device = index; }
extern "C" void stand_in_on_wait(void (*callback)(const char*)) { stand_in::wait_callback = callback; }

namespace at {
// The macro of torch for this needs the CUDA build.
using stand_in::Hooks;
static c10::Registerer<std::string, std::unique_ptr<CUDAHooksInterface>, CUDAHooksArgs> hooks_registerer(
    "CUDAHooks", CUDAHooksRegistry(),
    c10::Registerer<std::string, std::unique_ptr<CUDAHooksInterface>, CUDAHooksArgs>::DefaultCreator<Hooks>);
}  // namespace at

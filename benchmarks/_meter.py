"""A meter of tensor memory on CPUs: an allocator of torch that counts every allocation and every release."""

from typing import Any

SOURCE = """
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/extension.h>
#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace {
std::mutex guard;
std::unordered_map<void*, size_t> sizes;
size_t live = 0;
size_t peak = 0;

void release(void* data) {
  {
    const std::lock_guard<std::mutex> held(guard);
    const auto found = sizes.find(data);
    if (found != sizes.end()) {  // else it was allocated before the meter was installed
      live -= found->second;
      sizes.erase(found);
    }
  }
  c10::free_cpu(data);
}

struct CountingAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes > 0 ? c10::alloc_cpu(bytes) : nullptr;
    if (data != nullptr) {
      const std::lock_guard<std::mutex> held(guard);
      sizes[data] = bytes;
      live += bytes;
      peak = std::max(peak, live);
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
CountingAllocator allocator;
constexpr uint8_t FIRST_CHOICE = 255;
}  // namespace

void install() { c10::SetCPUAllocator(&allocator, FIRST_CHOICE); }
size_t peak_bytes() { return peak; }
"""


def install() -> Any:
    """Count all tensors on the CPU from now on; return an object whose peak_bytes() is the peak of their live bytes.

    Compiles the allocator at the first call, which needs a C++ compiler and ninja.
    """
    from torch.utils.cpp_extension import load_inline

    meter = load_inline("counting_allocator", [SOURCE], functions=["install", "peak_bytes"])
    meter.install()
    return meter

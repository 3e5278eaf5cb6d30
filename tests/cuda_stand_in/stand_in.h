// What device.cpp and operations.cpp share.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

namespace stand_in {

constexpr int kDevices = 8;

int current_device();
void set_current_device(int index);

// Allocator of the memory of the device: the memory of the CPU.
c10::Allocator* device_allocator();

bool is_pinned(const void* pointer);

// Report an operation for which the host would wait for the device.
void report_wait(const char* what);

}  // namespace stand_in

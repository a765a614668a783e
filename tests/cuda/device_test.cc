// CudaDevice through the contract, on the fake libcuda.so.1 whose kernels are the bodies that nvcc compiles.
#include "cuda/device.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "device/contract.h"
#include "device/fake_gpu.h"

namespace herring::testing {
namespace {

std::string library(const std::string& name) {
  return std::filesystem::canonical("/proc/self/exe").parent_path() / ("lib" + name + ".so");
}

template <class Function>
Function* symbol(const std::string& path, const char* name) {
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<Function*>(dlsym(handle, name));
}

class CudaWorld final : public DeviceWorld {
 public:
  /// The copy of the library: a device that was broken stays so, as in a process.
  explicit CudaWorld(const std::string& path)
      : device_(cuda::Driver::open(path), DeviceId{0}),
        gpu_(*symbol<FakeGpu*()>(path, "herring_fake_gpu")()),
        misuse_(symbol<const char*()>(path, "herring_fake_misuse")) {
    theirs_ = gpu_.create_stream();
    captured_ = gpu_.create_stream();
    gpu_.capture(captured_);
  }

  Device& device() override { return device_; }
  ForeignEvent fill_later(DeviceSpan memory, std::byte value) override {
    for (int i = 0; i < 20; ++i) gpu_.launch(theirs_, [] {});
    gpu_.launch(theirs_, [this, memory, value] {
      std::memset(gpu_.alias(memory.address, memory.bytes), static_cast<int>(value), memory.bytes);
    });
    const std::uint64_t event = gpu_.create_event();
    gpu_.record(event, theirs_);
    return {event};
  }
  ForeignStream captured_stream() override { return {captured_}; }
  ForeignStream plain_stream() override { return {theirs_}; }
  std::size_t too_much_memory() const override { return (64 << 20) + 1; }
  std::size_t too_much_pinned() const override { return (64 << 20) + 4096; }
  bool fail() override {
    gpu_.fail();
    return true;
  }
  std::vector<std::string> faults() const override {
    std::vector<std::string> all = gpu_.faults();
    if (*misuse_() != '\0') all.emplace_back(misuse_());
    return all;
  }

 private:
  cuda::CudaDevice device_;
  FakeGpu& gpu_;
  const char* (*misuse_)();
  std::uint64_t theirs_ = 0;
  std::uint64_t captured_ = 0;
};

/// Each world loads a library of its own, so that what one test breaks is broken for it alone.
std::unique_ptr<DeviceWorld> make_world(std::string&) {
  static int number = 0;
  const std::filesystem::path copy =
      std::filesystem::temp_directory_path() /
      ("herring-fake-cuda-" + std::to_string(getpid()) + "-" + std::to_string(++number) + ".so");
  std::filesystem::copy_file(library("fake_cuda"), copy, std::filesystem::copy_options::overwrite_existing);
  auto world = std::make_unique<CudaWorld>(copy);
  std::filesystem::remove(copy);
  return world;
}

INSTANTIATE_TEST_SUITE_P(CudaOverFakeDriver, DeviceContract,
                         ::testing::Values(DeviceFactory{"fake_driver", make_world}),
                         [](const auto& test) { return test.param.name; });

TEST(CudaDevice, GivesBackItsContextAndStreams) {
  const std::string path = library("fake_cuda");
  const auto driver = cuda::Driver::open(path);
  auto* const contexts = symbol<int()>(path, "herring_fake_contexts");
  const int before = contexts();
  {
    cuda::CudaDevice device(driver, DeviceId{0});
    static_cast<void>(device.create_stream());
    EXPECT_EQ(contexts(), before + 1);
    EXPECT_EQ(device.description(), "cuda:0 (Fake GPU, driver 12.4)");
  }
  EXPECT_EQ(contexts(), before);
}

}  // namespace
}  // namespace herring::testing

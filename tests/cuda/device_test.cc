// CudaDevice through the contract, on the fake libcuda.so.1 whose kernels are the bodies that nvcc compiles.
#include "cuda/device.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "device/contract.h"
#include "device/fake_gpu_world.h"

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

struct OpenedDevice {
  cuda::CudaDevice device;
};

class CudaWorld final : private OpenedDevice, public FakeGpuWorld {
 public:
  /// The copy of the library: a device that was broken stays so, as in a process.
  explicit CudaWorld(const std::string& path)
      : OpenedDevice{{cuda::Driver::open(path), DeviceId{0}}},
        FakeGpuWorld(*symbol<FakeGpu*()>(path, "herring_fake_gpu")()),
        misuse_(symbol<const char*()>(path, "herring_fake_misuse")) {}

  Device& device() override { return OpenedDevice::device; }
  std::vector<std::string> faults() const override {
    std::vector<std::string> all = FakeGpuWorld::faults();
    if (*misuse_() != '\0') all.emplace_back(misuse_());
    return all;
  }

 private:
  const char* (*misuse_)();
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

TEST(CudaDevice, LaunchesNothingUntilAllKernelsAreLoaded) {
  const std::string path = library("fake_cuda");
  cuda::CudaDevice device(cuda::Driver::open(path), DeviceId{0});
  const StreamHandle stream = device.create_stream();
  const cuda::PackParameters parameters;  // Of no tile.
  const auto launch = [&] {
    return device.launch(stream, KernelId::kUnpack, std::as_bytes(std::span(&parameters, 1)), 1);
  };
  auto* const lose = symbol<void(int)>(path, "herring_fake_lose_function");
  for (const int place : {1, 2, 1}) {
    lose(place);
    const Status status = launch();
    EXPECT_EQ(status.code(), Code::kUnavailable) << status.to_string();
  }
  EXPECT_TRUE(launch().is_ok());
}

}  // namespace
}  // namespace herring::testing

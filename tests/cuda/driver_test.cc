#include "cuda/driver.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "cuda/device.h"

namespace herring::cuda {
namespace {

/// A library that tests/CMakeLists.txt built beside the test.
std::string library(const std::string& name) {
  return std::filesystem::canonical("/proc/self/exe").parent_path() / ("lib" + name + ".so");
}

std::string refusal(const std::string& path) {
  try {
    static_cast<void>(Driver::open(path));
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), Code::kUnavailable);
    return error.status().message();
  }
  ADD_FAILURE() << path << " was taken";
  return {};
}

bool has(const std::string& text, const std::string& what) { return text.find(what) != std::string::npos; }

TEST(CudaDriver, OpensAndSaysWhatIsThere) {
  const auto driver = Driver::open(library("fake_cuda"));
  EXPECT_EQ(driver->version(), 12040);
  EXPECT_EQ(driver->version_text(), "12.4");
  EXPECT_EQ(driver->device_count(), 1);
  const GpuFacts facts = driver->facts(0);
  EXPECT_EQ(facts.name, "Fake GPU");
  EXPECT_EQ(facts.pci_bus_id, "0000:0F:00.0");
  EXPECT_EQ(facts.major, 9);
  EXPECT_EQ(facts.copy_engines, 2);
  EXPECT_EQ(facts.multiprocessors, 132);
}

TEST(CudaDriver, SaysWhichGpusReachEachOther) {
  const auto driver = Driver::open(library("fake_cuda_three"));
  EXPECT_EQ(driver->peers_of(0), std::vector<int>{1});
  EXPECT_EQ(driver->peers_of(1), std::vector<int>{0});
  EXPECT_TRUE(driver->peers_of(2).empty());
  EXPECT_TRUE(Driver::open(library("fake_cuda"))->peers_of(0).empty());
  EXPECT_EQ(survey(library("fake_cuda_three")).gpus[1].peers, std::vector<int>{0});
}

TEST(CudaDriver, EachReasonWhyThereIsNoneIsASentence) {
  const std::string none = refusal("/nowhere/libcuda.so.1");
  EXPECT_TRUE(has(none, "no driver on this machine")) << none;
  EXPECT_TRUE(has(none, "/nowhere/libcuda.so.1")) << none;
  const std::string old = refusal(library("fake_cuda_old"));
  EXPECT_TRUE(has(old, "driver for CUDA 10.2, older than 11.0: install a newer driver")) << old;
  const std::string lacking = refusal(library("fake_cuda_lacks"));
  EXPECT_TRUE(has(lacking, "has no symbol cuMemHostRegister_v2")) << lacking;
  const std::string empty = refusal(library("fake_cuda_empty"));
  EXPECT_TRUE(has(empty, "cuInit failed with CUDA_ERROR_NO_DEVICE (100)")) << empty;
  EXPECT_TRUE(has(empty, "the driver sees no GPU (CUDA_VISIBLE_DEVICES")) << empty;
  const std::string forked = refusal(library("fake_cuda_forked"));
  EXPECT_TRUE(has(forked, "CUDA was in use before this process was forked; start it with spawn")) << forked;
  const std::string other = refusal("libm.so.6");
  EXPECT_TRUE(has(other, "no symbol cuDriverGetVersion")) << other;
}

TEST(CudaDriver, ASurveyNeverThrows) {
  EXPECT_TRUE(has(survey("/nowhere/libcuda.so.1").problem, "no driver on this machine"));
  const Survey found = survey(library("fake_cuda"));
  EXPECT_EQ(found.problem, "");
  EXPECT_EQ(found.version, "12.4");
  ASSERT_EQ(found.gpus.size(), 1u);
  EXPECT_TRUE(has(found.library, "libfake_cuda.so"));
}

TEST(CudaDriver, ErrorsNameCallErrorAndWhatFollows) {
  const auto driver = Driver::open(library("fake_cuda"));
  const Status lost = driver->check(kIllegalAddress, "cuEventQuery");
  EXPECT_EQ(lost.code(), Code::kTransport);
  EXPECT_EQ(lost.message(),
            "cuda: cuEventQuery failed with CUDA_ERROR_ILLEGAL_ADDRESS (700), an illegal memory access was "
            "encountered; this process can no longer use the GPU: restart the process");
  EXPECT_EQ(driver->check(77777, "cuX").message(), "cuda: cuX failed with an error without a name (77777)");
  EXPECT_TRUE(driver->check(kSuccess, "cuX").is_ok());
}

TEST(CudaDriver, AForkedChildIsRefusedAndLeavesTheGpuAlone) {
  const auto driver = Driver::open(library("fake_cuda"));
  auto device = std::make_unique<CudaDevice>(driver, DeviceId{0});
  const StreamHandle stream = device->create_stream();
  const pid_t child = fork();
  if (child == 0) {
    Ticket ticket;
    const Status status = device->record(stream, ticket);
    DeviceSpan memory;
    const bool is_refused = status.code() == Code::kUnavailable && has(status.message(), "forked child") &&
                            has(status.message(), "spawn") && !device->allocate(16, memory).is_ok();
    bool throws = false;
    try {
      const CudaDevice second(driver, DeviceId{0});
    } catch (const Error&) {
      throws = true;
    }
    device.reset();
    _exit(is_refused && throws ? 0 : 1);
  }
  int status = 1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  Ticket ticket;
  EXPECT_TRUE(device->record(stream, ticket).is_ok());
}

TEST(CudaDevice, AGpuThatIsNotThereIsASentence) {
  try {
    const CudaDevice device(Driver::open(library("fake_cuda")), DeviceId{3});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), Code::kUnavailable);
    EXPECT_TRUE(has(error.status().message(), "no GPU with this number")) << error.status().message();
  }
}

}  // namespace
}  // namespace herring::cuda

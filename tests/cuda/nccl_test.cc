#include "cuda/nccl.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "cuda/open.h"

namespace herring::cuda {
namespace {

/// A library that tests/CMakeLists.txt built beside the test.
std::string fake(const std::string& name) {
  return std::filesystem::canonical("/proc/self/exe").parent_path() / ("lib" + name + ".so");
}

std::string refusal(const std::string& path) {
  try {
    static_cast<void>(Nccl::open(path));
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), Code::kUnavailable);
    return error.status().message();
  }
  ADD_FAILURE() << path << " was taken";
  return {};
}

void expect_says(const std::string& text, const std::string& what) {
  EXPECT_NE(text.find(what), std::string::npos) << text;
}

TEST(Nccl, OpensAndSaysWhatItIs) {
  const auto nccl = Nccl::open(fake("fake_nccl"));
  EXPECT_EQ(nccl->version(), 22707);
  EXPECT_EQ(nccl->description(), "NCCL 2.27.7 (" + fake("fake_nccl") + ")");
  EXPECT_EQ(nccl->make_id().front(), std::byte{'x'});
  EXPECT_EQ(open_nccl(fake("fake_nccl")), open_nccl(fake("fake_nccl"))) << "opened once";
}

TEST(Nccl, EachReasonWhyThereIsNoneIsASentence) {
  expect_says(refusal("/nowhere/libnccl.so.2"), "no NCCL on this machine (/nowhere/libnccl.so.2");
  expect_says(refusal("/nowhere/libnccl.so.2"), "set HERRING_NCCL to its path");
  expect_says(refusal(fake("fake_nccl_old")), "is NCCL 2.17.3, older than 2.18.0: install a newer one");
  expect_says(refusal(fake("fake_nccl_lacks")), "has no symbol ncclCommAbort, which Herring needs");
  expect_says(refusal(fake("fake_cuda")), "has no symbol ncclGetVersion, so it is not NCCL");
  EXPECT_THROW(open_nccl(fake("fake_nccl_old")), Error);
}

TEST(Nccl, WhatItRefusesIsSaidInItsWords) {
  const auto nccl = Nccl::open(fake("fake_nccl"));
  try {
    static_cast<void>(nccl->connect(nccl->make_id(), 2, 0, 8));
    FAIL() << "it connected";
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), Code::kUnavailable);
    expect_says(error.status().message(),
                "ncclCommInitRankConfig failed with internal error (3): this fake connects nobody");
    expect_says(error.status().message(), "NCCL_DEBUG=INFO");
  }
}

/// HERRING_TEST_NCCL: the real one. Without a GPU it says so, and does nothing worse.
TEST(Nccl, TheRealOneIsSpokenToAsItWants) {
  const char* const path = std::getenv("HERRING_TEST_NCCL");
  if (path == nullptr) GTEST_SKIP() << "HERRING_TEST_NCCL is not set";
  const auto nccl = Nccl::open(path);
  EXPECT_GE(nccl->version(), Nccl::kOldestVersion);
  const DeviceCollectivesLibrary::Id id = nccl->make_id();
  EXPECT_NE(id, DeviceCollectivesLibrary::Id{});
  try {
    const auto alone = nccl->connect(id, 1, 0, 8);
    const Status status = alone->poll();
    EXPECT_TRUE(status.is_ok() || status.is_again()) << status.to_string();
  } catch (const Error& error) {
    expect_says(error.status().message(), "unhandled cuda error");
  }
}

}  // namespace
}  // namespace herring::cuda

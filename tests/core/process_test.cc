#include "core/process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace herring {
namespace {

TEST(Process, IsKnownAgainAfterEveryFork) {
  EXPECT_EQ(process_id(), getpid());
  const pid_t child = fork();
  if (child == 0) {
    const bool is_right = process_id() == getpid() && process_id() == getpid();
    const pid_t grandchild = fork();
    if (grandchild == 0) _exit(process_id() == getpid() ? 0 : 1);
    int status = 0;
    waitpid(grandchild, &status, 0);
    _exit(is_right && status == 0 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(process_id(), getpid());
}

}  // namespace
}  // namespace herring

#include "tcp/congestion.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "core/status.h"

namespace herring::tcp {
namespace {

struct Socket {
  Socket() : fd(socket(AF_INET, SOCK_STREAM, IPPROTO_TCP)) {}
  ~Socket() { close(fd); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  bool set(const std::string& name) const {
    return setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0;
  }
  int fd;
};

TEST(CongestionControl, AutoTakesAnotherOneThanBbr) {
  const Socket socket;
  if (!socket.set("bbr")) GTEST_SKIP() << "this kernel has no BBR, or does not allow it";
  CongestionControl("auto").apply(socket.fd);
  const std::string now = CongestionControl::of(socket.fd);
  EXPECT_TRUE(now == "cubic" || now == "reno") << now;
}

TEST(CongestionControl, AutoLeavesWhatIsNotBbr) {
  const Socket socket;
  ASSERT_TRUE(socket.set("reno"));
  CongestionControl("auto").apply(socket.fd);
  EXPECT_EQ(CongestionControl::of(socket.fd), "reno");
}

TEST(CongestionControl, SystemLeavesEverything) {
  const Socket socket;
  const std::string before = CongestionControl::of(socket.fd);
  EXPECT_FALSE(before.empty());
  CongestionControl("system").apply(socket.fd);
  EXPECT_EQ(CongestionControl::of(socket.fd), before);
}

TEST(CongestionControl, ANameIsTaken) {
  const Socket socket;
  CongestionControl("reno").apply(socket.fd);
  EXPECT_EQ(CongestionControl::of(socket.fd), "reno");
}

TEST(CongestionControl, ANameThatTheKernelLacksIsAnErrorWithThoseItHas) {
  try {
    CongestionControl("pigeon");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), Code::kUnavailable);
    EXPECT_NE(error.status().message().find("HERRING_TCP_CONGESTION=pigeon"), std::string::npos);
    EXPECT_NE(error.status().message().find("reno"), std::string::npos);
  }
}

}  // namespace
}  // namespace herring::tcp

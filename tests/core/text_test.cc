#include "core/text.h"

#include <gtest/gtest.h>

#include "core/status.h"

namespace herring {
namespace {

TEST(SplitList, PartsBetweenCommasWithoutSpaces) {
  EXPECT_EQ(split_list(""), std::vector<std::string>{});
  EXPECT_EQ(split_list("eth0"), std::vector<std::string>{"eth0"});
  EXPECT_EQ(split_list(" eth0 ,eth1,, 10.0.0.1,"), (std::vector<std::string>{"eth0", "eth1", "10.0.0.1"}));
}

// A peer's text must not move the cursor, change the title or hide lines of whoever reads the error.
TEST(Printable, ShowsNothingThatSteersATerminal) {
  EXPECT_EQ(printable("worker 3: caf\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x90\x9F\n\tok"),
            "worker 3: caf\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x90\x9F\n\tok");
  EXPECT_EQ(printable("a\x1B[2J\x07\r\x7F z"), "a?[2J??? z");
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a?b");
  EXPECT_EQ(printable("\xC2\x9B"
                      "2J"),
            "?2J")
      << "the one-character CSI";
  EXPECT_EQ(printable("\xE2\x80\xAE"
                      "abc"),
            "?abc")
      << "right to left from here on";
}

// A text that was cut inside a character, or never was one: Python raises UnicodeDecodeError instead of the error.
TEST(Printable, IsValidUtf8) {
  EXPECT_EQ(printable("caf\xC3"), "caf?");
  EXPECT_EQ(printable("\xC0\xAF \xED\xA0\x80 \xF5 \xE2\x82"), "?? ??? ? ??");
  EXPECT_EQ(printable("\xF0\x82\x82\xAC"), "????") << "longer than it has to be";
}

TEST(Printable, IsWhatEveryErrorShows) {
  EXPECT_EQ(Status(Code::kPeerLost, "worker 1 failed: \x1B]0;pwned\x07").message(), "worker 1 failed: ?]0;pwned?");
  EXPECT_EQ(std::string(Error(Code::kPeerLost, "\x1B[2J").what()).find('\x1B'), std::string::npos);
}

TEST(Counted, OneIsNoPlural) {
  EXPECT_EQ(counted(1, "server"), "1 server");
  EXPECT_EQ(counted(0, "server"), "0 servers");
  EXPECT_EQ(counted(2, "server"), "2 servers");
  EXPECT_EQ(counted(1, "server process", "server processes"), "1 server process");
  EXPECT_EQ(counted(3, "server process", "server processes"), "3 server processes");
}

}  // namespace
}  // namespace herring

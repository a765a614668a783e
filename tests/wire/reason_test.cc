#include "wire/reason.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace herring::wire {
namespace {

TEST(Reason, SurvivesTheWire) {
  const Status given(Code::kMismatch, "ranks disagree");
  const Status taken = decode_reason(encode_reason(given));
  EXPECT_EQ(taken.code(), Code::kMismatch);
  EXPECT_EQ(taken.message(), "ranks disagree");
}

TEST(Reason, OfAnOkStatusIsAnErrorAllTheSame) {
  EXPECT_EQ(decode_reason(encode_reason(Status::ok())).code(), Code::kCancelled);
}

TEST(Reason, TextIsCutAndCannotSteerATerminal) {
  const std::string text = std::string("\x1b[31m\x7f\n") + std::string(2 * kMaxReasonText, 'x');
  const Status taken = decode_reason(encode_reason(Status(Code::kTimeout, text)));
  EXPECT_EQ(taken.message().size(), kMaxReasonText);
  EXPECT_EQ(taken.message().substr(0, 8), "?[31m? x");
  // As a peer would send it that encodes nothing.
  std::vector<std::byte> raw{std::byte{static_cast<unsigned char>(Code::kTimeout)}};
  for (const char c : text) raw.push_back(static_cast<std::byte>(c));
  EXPECT_EQ(decode_reason(raw).message().substr(0, 8), " [31m  x");
}

TEST(Reason, NonsenseIsAProtocolError) {
  EXPECT_EQ(decode_reason({}).code(), Code::kProtocol);
  for (const int code : {0, 1, 14, 255}) {
    const std::byte body[] = {static_cast<std::byte>(code), std::byte{'x'}};
    EXPECT_EQ(decode_reason(body).code(), Code::kProtocol) << code;
  }
}

}  // namespace
}  // namespace herring::wire

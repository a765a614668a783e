#include "core/hmac.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "core/sha256.h"

namespace herring {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string hex(std::span<const std::byte> bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const std::byte b : bytes) {
    text += kDigits[std::to_integer<std::size_t>(b >> 4)];
    text += kDigits[std::to_integer<std::size_t>(b & std::byte{15})];
  }
  return text;
}

std::string hmac_hex(std::string_view key, std::string_view data) {
  return hex(hmac_sha256(bytes_of(key), bytes_of(data)));
}

TEST(Sha256, AgreesWithNistVectors) {
  EXPECT_EQ(hex(sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256(bytes_of("abc"))), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256(bytes_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(
      hex(sha256(bytes_of("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlm"
                          "nopqrsmnopqrstnopqrstu"))),
      "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  EXPECT_EQ(hex(sha256(bytes_of(std::string(1'000'000, 'a')))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(HmacSha256, AgreesWithRfc4231) {
  EXPECT_EQ(hmac_hex(std::string(20, '\x0b'), "Hi There"),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hmac_hex("Jefe", "what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hmac_hex(std::string(20, '\xaa'), std::string(50, '\xdd')),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string counting;
  for (char c = 1; c <= 25; ++c) counting += c;
  EXPECT_EQ(hmac_hex(counting, std::string(50, '\xcd')),
            "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  EXPECT_EQ(hmac_hex(std::string(20, '\x0c'), "Test With Truncation").substr(0, 32),
            "a3b6167473100ee06e0c796c2955552b");
  EXPECT_EQ(hmac_hex(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(hmac_hex(std::string(131, '\xaa'),
                     "This is a test using a larger than block-size key and a larger than block-size data. The key "
                     "needs to be hashed before being used by the HMAC algorithm."),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(HmacSha256, TakesAnEmptyKey) {
  // A job without a secret still runs the handshake; it must not read past an empty key.
  EXPECT_EQ(hex(hmac_sha256({}, {})), "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad");
}

TEST(EqualConstantTime, SeesEveryDifferingByteAndLength) {
  const Digest digest = sha256(bytes_of("x"));
  EXPECT_TRUE(equal_constant_time(digest, digest));
  EXPECT_TRUE(equal_constant_time({}, {}));
  for (std::size_t i = 0; i < digest.size(); ++i) {
    Digest other = digest;
    other[i] ^= std::byte{0x80};
    EXPECT_FALSE(equal_constant_time(digest, other)) << i;
  }
  EXPECT_FALSE(equal_constant_time(digest, std::span(digest).first(31)));
}

TEST(Sha256, TheProcessorsInstructionsAndThePlainOnesAgree) {
  const internal::Compress best = internal::best_sha256_compress();
  std::mt19937_64 random(20251124);
  internal::Sha256State fast;
  for (std::uint32_t& word : fast) word = static_cast<std::uint32_t>(random());
  internal::Sha256State plain = fast;
  for (int i = 0; i < 1000; ++i) {
    std::array<std::byte, internal::kBlockBytes> block;
    for (std::byte& byte : block) byte = static_cast<std::byte>(random());
    best(fast, block);
    internal::sha256_compress_scalar(plain, block);
    ASSERT_EQ(fast, plain) << "block " << i << ", seed 20251124";
  }
}

TEST(RandomBytes, FillsAllAndDiffersEachTime) {
  std::vector<std::byte> first(1000);
  std::vector<std::byte> second(1000);
  random_bytes(first);
  random_bytes(second);
  EXPECT_NE(first, second);
  // 1000 bytes of which the last 32 stayed zero: chance 2^-256.
  EXPECT_NE(std::vector<std::byte>(first.end() - 32, first.end()), std::vector<std::byte>(32));
  random_bytes({});
}

}  // namespace
}  // namespace herring

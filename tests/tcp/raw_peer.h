#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "tcp/address.h"
#include "tcp/frame.h"
#include "tcp/handshake.h"
#include "tcp/tcp.h"

namespace herring::tcp {

using Bytes = std::vector<std::byte>;

inline Digest test_key(int which = 0) {
  Digest key{};
  key[0] = static_cast<std::byte>(which);
  return key;
}

inline Options test_options(int which_key = 0) {
  Options options;
  options.interfaces = {"lo"};
  options.key = test_key(which_key);
  options.strangers = std::make_shared<StrangerCounters>();
  return options;
}

/// Who talks to an endpoint by hand, over a plain socket.
class RawPeer {
 public:
  explicit RawPeer(Endpoint& endpoint) {
    SocketAddress own;
    own.storage.ss_family = AF_INET;
    reinterpret_cast<sockaddr_in*>(&own.storage)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    target_ = decode_peer_address(PeerId{0}, endpoint.address(), {own, {}});
    socket_ = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT_EQ(connect(socket_, target_.socket.get(), target_.socket.length()), 0) << std::strerror(errno);
  }
  ~RawPeer() { hang_up(); }
  RawPeer(const RawPeer&) = delete;
  RawPeer& operator=(const RawPeer&) = delete;

  HelloBytes hello() const { return make_hello(nonce_, target_.instance, own_); }
  bool write(std::span<const std::byte> bytes) {
    return send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }
  /// What comes within a second while `drive` runs; fewer bytes where no more did.
  Bytes read(std::size_t bytes, const std::function<void()>& drive) {
    Bytes in(bytes);
    std::size_t got = 0;
    for (int i = 0; i < 1000 && got < bytes; ++i) {
      drive();
      pollfd wanted{socket_, POLLIN, 0};
      if (poll(&wanted, 1, 1) <= 0) continue;
      const ssize_t count = recv(socket_, &in[got], bytes - got, 0);
      if (count <= 0) break;
      got += static_cast<std::size_t>(count);
    }
    in.resize(got);
    return in;
  }
  /// The handshake, as one who has the key.
  bool enter(const Digest& key, const std::function<void()>& drive) {
    if (!write(hello())) return false;
    const Bytes answer = read(kAnswerBytes, drive);
    if (!check_answer(key, hello(), answer)) return false;
    return write(make_proof(key, hello(), std::span(answer).first(sizeof(Nonce))));
  }
  /// The frame alone.
  bool announce(Tag tag, std::uint32_t bytes) { return write(encode_frame({tag, bytes})); }
  /// Closed by the endpoint.
  bool is_closed(const std::function<void()>& drive) {
    for (int i = 0; i < 1000; ++i) {
      drive();
      pollfd wanted{socket_, POLLIN, 0};
      std::byte one{};
      if (poll(&wanted, 1, 1) > 0 && recv(socket_, &one, 1, MSG_DONTWAIT) <= 0) return true;
    }
    return false;
  }
  void end_sending() { shutdown(socket_, SHUT_WR); }
  /// As a process that crashed: the other end gets a reset.
  void reset() {
    const linger now{1, 0};
    setsockopt(socket_, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    hang_up();
  }
  void hang_up() {
    if (socket_ >= 0) close(socket_);
    socket_ = -1;
  }

 private:
  EndpointAddress target_;
  const Instance own_ = fresh_nonce();
  const Nonce nonce_ = fresh_nonce();
  int socket_ = -1;
};

/// An endpoint and everything that it completed, by token.
struct Party {
  std::unique_ptr<Endpoint> endpoint;
  std::map<std::uint64_t, transport::Completion> done = {};

  std::size_t poll() {
    std::vector<transport::Completion> batch(16);
    const std::size_t count = endpoint->poll(batch);
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_TRUE(done.try_emplace(batch[i].token.value, batch[i]).second)
          << "token " << batch[i].token.value << " completed twice";
    }
    return count;
  }
  bool is_done(std::uint64_t token) const { return done.contains(token); }
};

inline Bytes pattern(std::size_t bytes, std::uint32_t seed) {
  Bytes data(bytes);
  std::uint32_t state = seed * 2654435761u + 1;
  for (std::byte& b : data) {
    state = state * 1664525u + 1013904223u;
    b = static_cast<std::byte>(state >> 24);
  }
  return data;
}

/// Parties that know each other, all played by one thread.
class TcpTest : public ::testing::Test {
 protected:
  void open(std::size_t count, const Options& options = test_options()) {
    parties_.clear();
    parties_.resize(count);
    for (Party& party : parties_) party.endpoint = open_endpoint(options);
    for (Party& party : parties_) {
      for (std::uint32_t i = 0; i < count; ++i) party.endpoint->add_peer(PeerId{i}, parties_[i].endpoint->address());
    }
  }
  std::size_t poll_all() {
    std::size_t count = 0;
    for (Party& party : parties_) count += party.endpoint != nullptr ? party.poll() : 0;
    return count;
  }
  std::function<void()> drive() {
    return [this] { poll_all(); };
  }
  bool until(const std::function<bool()>& condition, double limit_s = 30) {
    const auto start = std::chrono::steady_clock::now();
    while (!condition()) {
      if (poll_all() > 0) continue;
      const auto now = std::chrono::steady_clock::now();
      if (now - start > std::chrono::duration<double>(limit_s)) return false;
      for (Party& party : parties_) {
        if (party.endpoint != nullptr) party.endpoint->wait(now + std::chrono::microseconds(200));
      }
    }
    return true;
  }
  Status send(std::size_t from, std::uint32_t to, std::uint64_t tag, std::span<const std::byte> bytes,
              std::uint64_t token) {
    return parties_[from].endpoint->post_send(PeerId{to}, Tag{tag}, bytes, {}, Token{token});
  }
  Status receive(std::size_t at, std::uint64_t tag, std::span<std::byte> bytes, std::uint64_t token) {
    return parties_[at].endpoint->post_receive(Tag{tag}, bytes, {}, Token{token});
  }
  /// One message from 0 to 1, as a check that all is well.
  void expect_alive(std::uint64_t token) {
    const Bytes data = pattern(5000, static_cast<std::uint32_t>(token));
    Bytes in(5000);
    ASSERT_TRUE(receive(1, token, in, token).is_ok());
    ASSERT_TRUE(send(0, 1, token, data, token).is_ok());
    ASSERT_TRUE(until([&] { return parties_[1].is_done(token) && parties_[0].is_done(token); }));
    EXPECT_EQ(in, data);
  }

  std::vector<Party> parties_;
};

}  // namespace herring::tcp

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

/// Owners of the system resources that ranks of one host share. All set-up calls throw Error(kTransport) that names the
/// call and what it was for.
namespace herring::intra_node {

/// A file descriptor, closed with its owner.
class FileDescriptor final {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() { reset(); }
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  int release();
  void reset();

 private:
  int fd_ = -1;
};

/// Anonymous shared memory of a fixed size: no name in the file system, gone with its last owner, sealed so that nobody
/// can change its size (which would kill those who map it).
FileDescriptor make_shared_memory(const char* purpose, std::uint64_t bytes);
/// Checks that a descriptor from another process is such memory of exactly this size. Throws Error(kProtocol).
void check_shared_memory(const FileDescriptor& fd, std::uint64_t bytes, const std::string& whose);
/// A non-blocking eventfd.
FileDescriptor make_doorbell();
/// Checks that a descriptor from another process is an eventfd, and makes sure that ringing it never blocks. Throws
/// Error(kProtocol).
void check_doorbell(const FileDescriptor& fd, const std::string& whose);

/// A shared, writable mapping of the whole of `fd`; pages are taken when touched.
class Mapping final {
 public:
  Mapping() = default;
  Mapping(const FileDescriptor& fd, std::uint64_t bytes, const std::string& purpose);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace herring::intra_node

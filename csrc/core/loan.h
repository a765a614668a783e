#pragma once

#include <cstddef>
#include <span>

namespace herring {

/// Memory that somebody in this process lends instead of sending what is in it. Its owner may take it back at any time,
/// so whoever reads or writes it does so between begin() and end(). Given back when the last reference goes.
class Loan {
 public:
  Loan() = default;
  virtual ~Loan() = default;
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

  virtual std::span<std::byte> memory() const = 0;
  /// False: it was taken back. Else its owner waits for end() before it takes it back.
  virtual bool begin() = 0;
  virtual void end() = 0;
};

}  // namespace herring

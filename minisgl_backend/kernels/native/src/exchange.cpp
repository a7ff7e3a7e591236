#include "exchange.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

namespace minisgl {
namespace {

// Rounds are counted in 32 bits, which is what a futex has; they wrap, so they are compared by their difference.
struct alignas(kMailboxBytes) Mailbox {
  std::atomic<uint32_t> round;     // the last one whose piece is in the slot
  std::atomic<uint32_t> sleepers;  // who wait for the next
};
static_assert(sizeof(Mailbox) == kMailboxBytes && sizeof(std::atomic<uint32_t>) == 4);

constexpr int kSpins = 2000;  // about 100 µs: then the core is given away, another rank may need it
constexpr double kNapS = 0.05;

double now_s() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

Mailbox& mailbox(const Exchange& exchange, int64_t rank) {
  return reinterpret_cast<Mailbox*>(exchange.memory)[rank];
}

uint8_t* slot(const Exchange& exchange, uint32_t round, int64_t rank) {
  uint8_t* slots = exchange.memory + exchange.ranks * kMailboxBytes;
  return slots + ((round & 1) * exchange.ranks + rank) * exchange.slot_bytes;
}

void say(Mailbox& box, uint32_t round) {
  box.round.store(round, std::memory_order_seq_cst);
  if (box.sleepers.load(std::memory_order_seq_cst)) syscall(SYS_futex, &box.round, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// A kernel throws nothing. The engine ends with a rank in any case, and this line says which one was missing.
[[noreturn]] void give_up(const Exchange& exchange, int64_t rank) {
  std::fprintf(stderr, "rank %ld: rank %ld has not come to the exchange for %g s\n", static_cast<long>(exchange.rank),
               static_cast<long>(rank), exchange.patience_s);
  std::fflush(stderr);
  _exit(70);
}

void wait_for(const Exchange& exchange, int64_t rank, uint32_t round) {
  Mailbox& box = mailbox(exchange, rank);
  const auto is_there = [&](uint32_t seen) { return static_cast<int32_t>(seen - round) >= 0; };
  for (int spins = 0; spins < kSpins; ++spins) {
    if (is_there(box.round.load(std::memory_order_acquire))) return;
    _mm_pause();
  }
  const double began_s = now_s();
  const timespec nap{0, static_cast<long>(kNapS * 1e9)};
  box.sleepers.fetch_add(1, std::memory_order_seq_cst);
  for (uint32_t seen; !is_there(seen = box.round.load(std::memory_order_seq_cst));) {
    if (now_s() - began_s > exchange.patience_s) give_up(exchange, rank);
    syscall(SYS_futex, &box.round, FUTEX_WAIT, seen, &nap, nullptr, 0);
  }
  box.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

// One round: what `put` writes into our slot, `take` reads from all, when all are there.
template <class Put, class Take>
void round_of(const Exchange& exchange, Put put, Take take) {
  Mailbox& own = mailbox(exchange, exchange.rank);
  const uint32_t round = own.round.load(std::memory_order_relaxed) + 1;
  put(slot(exchange, round, exchange.rank));
  say(own, round);
  for (int64_t rank = 0; rank < exchange.ranks; ++rank) wait_for(exchange, rank, round);
  take(round);
}

// Calls each(begin, size) for the pieces of so many bytes that fit into a slot.
template <class F>
void pieces(const Exchange& exchange, int64_t bytes, F each) {
  for (int64_t begin = 0; begin < bytes; begin += exchange.slot_bytes) {
    each(begin, std::min(exchange.slot_bytes, bytes - begin));
  }
}

}  // namespace

void add_up(Dtype dtype, Exchange exchange, void* x, int64_t n) {
  by_dtype(dtype, [=](auto kind) {
    using T = decltype(kind);
    const auto kernel = [=](Part) {
      pieces(exchange, n * static_cast<int64_t>(sizeof(T)), [&](int64_t begin, int64_t size) {
        T* own = static_cast<T*>(x) + begin / static_cast<int64_t>(sizeof(T));
        const auto take = [&](uint32_t round) {
          map(size / static_cast<int64_t>(sizeof(T)), own, [&](int64_t at, int64_t count) {
            Vec sum = load_up_to(reinterpret_cast<const T*>(slot(exchange, round, 0)) + at, count);
            for (int64_t rank = 1; rank < exchange.ranks; ++rank) {
              sum = sum + load_up_to(reinterpret_cast<const T*>(slot(exchange, round, rank)) + at, count);
            }
            return sum;
          });
        };
        round_of(exchange, [&](uint8_t* to) { std::memcpy(to, own, size); }, take);
      });
    };
    launch(kernel, 1);
  });
}

void join_columns(Exchange exchange, const void* x, int64_t rows, int64_t width, int64_t columns, void* out) {
  const auto kernel = [=](Part) {
    pieces(exchange, rows * width, [&](int64_t begin, int64_t size) {
      const auto take = [&](uint32_t round) {
        for (int64_t rank = 0; rank < exchange.ranks; ++rank) {
          const int64_t room = std::clamp<int64_t>(columns - rank * width, 0, width);  // of a row, in the output
          const uint8_t* from = slot(exchange, round, rank);
          for (int64_t at = begin; at < begin + size;) {
            const int64_t row = at / width, column = at % width;
            const int64_t count = std::min(width - column, begin + size - at);
            if (column < room) {
              uint8_t* to = static_cast<uint8_t*>(out) + row * columns + rank * width + column;
              std::memcpy(to, from + (at - begin), std::min(count, room - column));
            }
            at += count;
          }
        }
      };
      round_of(exchange, [&](uint8_t* to) { std::memcpy(to, static_cast<const uint8_t*>(x) + begin, size); }, take);
    });
  };
  launch(kernel, 1);
}

void from_first(Exchange exchange, void* x, int64_t bytes) {
  const auto kernel = [=](Part) {
    pieces(exchange, bytes, [&](int64_t begin, int64_t size) {
      uint8_t* own = static_cast<uint8_t*>(x) + begin;
      const auto put = [&](uint8_t* to) {
        if (exchange.rank == 0) std::memcpy(to, own, size);
      };
      round_of(exchange, put, [&](uint32_t round) {
        if (exchange.rank != 0) std::memcpy(own, slot(exchange, round, 0), size);
      });
    });
  };
  launch(kernel, 1);
}

}  // namespace minisgl

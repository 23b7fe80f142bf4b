//! Nothing to use: the test of this crate lets farcell's RDMA layer work on the
//! memory of a peer that knows nothing of farcell, one that is written with the
//! `ibverbs` crate.
//!
//! `scripts/rdma-tests` installs what this needs, builds it, and runs it in a
//! machine that has a device.
//!
//! It stands outside the workspace's default members, so that nobody needs
//! clang, cmake or a -dev package to build farcell. On Debian 12:
//!
//! ```text
//! apt-get install -y --no-install-recommends \
//!     cmake make gcc libibverbs-dev libnl-3-dev libnl-route-3-dev libclang-14-dev pkg-config
//! LIBCLANG_PATH=/usr/lib/llvm-14/lib cargo test -p farcell-interop --no-run
//! scripts/soft-roce run --env FARCELL_TEST_RDMA=required -- cargo test --offline -p farcell-interop
//! ```

//! Nothing to use: the tests of this crate compare the hand-written ABI of
//! `farcell-sys` with the headers of the installed libibverbs, as bindgen sees
//! them through the `rdma-sys` crate.
//!
//! It stands outside the workspace's default members, so that nobody needs
//! clang or a -dev package to build farcell. On Debian 12:
//!
//! ```text
//! apt-get install -y --no-install-recommends libibverbs-dev librdmacm-dev libclang-14-dev pkg-config
//! LIBCLANG_PATH=/usr/lib/llvm-14/lib cargo test -p farcell-abi-check
//! ```
//!
//! The bindgen of `rdma-sys` reads anonymous types wrongly with libclang 16
//! and newer, hence the explicit 14.

//! Promise: a transport is only a way to the cells. What is promised of cells,
//! waits, messages and sessions holds over each of them, and over each two and
//! all of them at once on the same cells.
//!
//! Each promise is written once, as a function of the transports that its clients
//! use, and becomes a test for each of them: `events::a_pulse_is_not_lost::shm::tcp`
//! is the promise with the first client in shared memory and the second over TCP,
//! `mixed` the one with all of them. To put a new transport under all this, add it
//! to `transports!` below.
//!
//! Those with RDMA need a device: run them with `scripts/soft-roce run` where there
//! is none. Without one each says so and passes, unless `FARCELL_TEST_RDMA` is
//! `required`; then those without RDMA leave the time to the others.

#[path = "../common/mod.rs"]
mod common;

/// The transports under test, as `farcell::TransportChoice` names them, and how
/// their tests are called. This is the one list.
macro_rules! transports {
    ($then:ident $($what:tt)*) => {
        $then! { $($what)* [tcp: Tcp, shm: Shm, rdma: Rdma] }
    };
}

/// Promises of one client: a test for each transport.
macro_rules! alone {
    ($($promise:ident)*) => { $( transports! { each_alone $promise } )* };
}

macro_rules! each_alone {
    ($promise:ident [$($name:ident: $way:ident),*]) => {
        mod $promise {
            $(
                #[test]
                fn $name() {
                    $crate::set::Set::of(&[$crate::set::Way::$way]).keeps(super::$promise);
                }
            )*
        }
    };
}

/// Promises of several clients: a test for each transport with itself and with each
/// other one, in both orders, and one with all of them.
macro_rules! together {
    ($($promise:ident)*) => { $( transports! { each_with_each $promise } )* };
}

macro_rules! each_with_each {
    ($promise:ident [$($name:ident: $way:ident),*]) => {
        each_with_each! { @all $promise [$($name: $way),*] [$($name: $way),*] }
    };
    (@all $promise:ident [$($name:ident: $way:ident),*] $list:tt) => {
        mod $promise {
            $( mod $name { one_with_each! { $promise $way $list } } )*

            #[test]
            fn mixed() {
                $crate::set::Set::of(&[$($crate::set::Way::$way),*]).keeps(super::$promise);
            }
        }
    };
}

macro_rules! one_with_each {
    ($promise:ident $first:ident [$($name:ident: $way:ident),*]) => {
        $(
            #[test]
            fn $name() {
                use $crate::set::{Set, Way};
                Set::of(&[Way::$first, Way::$way]).keeps(super::super::$promise);
            }
        )*
    };
}

mod barriers;
mod batches;
mod connection;
mod counters;
mod events;
mod locks;
mod peers;
mod refused;
mod removed;
#[cfg(feature = "cli")]
mod restart;
mod selections;
mod semaphores;
mod set;
mod slots;
mod threads;
mod waits;

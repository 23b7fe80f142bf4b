//! Promise: a forked child does not use its parent's session by mistake, has
//! one of its own if it connects, and the parent's goes on. One test in a binary
//! of its own, since it forks.

#![allow(unsafe_code, reason = "fork is what is tested")]

mod common;
use common::{client, server};
use farcell::{Error, TransportChoice};
use farcell_sys::libc;
use std::time::Duration;

#[test]
fn a_child_is_refused_and_the_parent_goes_on() {
    let server = server().start().unwrap();
    for choice in [TransportChoice::Shm, TransportChoice::Tcp] {
        let client = client(&server).transport(choice).connect().unwrap();
        let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
        let counter = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
        let lock = client.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
        let semaphore = client.semaphores("s", 1, 1, 1, 1).unwrap().at(0, 0).unwrap();
        let barrier = client.barriers("b", 1, 1, 1).unwrap().at(0, 0).unwrap();
        let guard = lock.lock().unwrap();
        barrier.wait().unwrap();
        event.clear().unwrap();
        counter.store(5).unwrap();
        // SAFETY: no other thread of this process holds a lock that the child
        // needs; it leaves by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = |result: Result<(), Error>| matches!(result, Err(Error::Forked { .. }));
            let all = [
                refused(event.set().map(drop)),
                refused(event.is_set().map(drop)),
                refused(counter.fetch_add(1).map(drop)),
                refused(counter.load().map(drop)),
                refused(event.wait_timeout(Duration::from_millis(10)).map(drop)),
                refused(client.batch().load(&counter).run().map(drop)),
                refused(client.info().map(drop)),
                refused(lock.try_lock().map(drop)),
                refused(semaphore.acquire().map(drop)),
                refused(barrier.wait().map(drop)),
                refused(guard.unlock()),
            ];
            drop((event, counter));
            drop(client);
            let failed = all.iter().position(|fine| !fine).map_or(0, |at| at as i32 + 1);
            // SAFETY: ends the child without running what the parent set up.
            unsafe { libc::_exit(failed) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status), "the child was killed: {status:#x}");
        assert_eq!(libc::WEXITSTATUS(status), 0, "what of the list was not refused, by {choice:?}");
        guard.check().unwrap();
        guard.unlock().unwrap();
        assert_eq!(lock.lock().unwrap().token(), lock.token().unwrap());
        semaphore.acquire().unwrap();
        semaphore.release().unwrap();
        barrier.wait().unwrap();
        assert!(event.set().unwrap());
        assert_eq!(counter.fetch_add(1).unwrap(), 5);
        assert_eq!(server.sessions(), 1, "the child has ended nothing of its parent's");
        client.close();
        common::eventually("it is over", || server.sessions() == 0);
    }
}

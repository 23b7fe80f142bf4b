//! Promise: a child that is forked from a process with a client or a server can
//! do nothing to it, by no operation and not by dropping it. It is told so, and
//! connects for itself.

#![allow(unsafe_code, reason = "fork is what is tested")]

mod common;
use common::rdma::{LONG, device, over, rdma_server};
use common::{client, eventually, server};
use farcell::{Client, Error, Result, Server, TransportChoice};
use farcell_sys::libc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A child has what other threads held at that moment: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A forked child.
struct Child(libc::pid_t);

impl Child {
    /// Forks. `None` in the child, which has to end with [`leave`].
    fn fork() -> Option<Child> {
        // SAFETY: the C library makes its own locks usable in the child, and no
        // other thread of the test holds one that the child needs.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "no fork");
        (pid > 0).then_some(Child(pid))
    }

    /// Waits for its end: the exit code.
    fn wait(self) -> i32 {
        let begun = Instant::now();
        let mut status = 0;
        // SAFETY: waits for the child made above.
        while unsafe { libc::waitpid(self.0, &raw mut status, libc::WNOHANG) } == 0 {
            if begun.elapsed() > LONG {
                // SAFETY: a child of ours, not yet waited for.
                unsafe { libc::kill(self.0, libc::SIGKILL) };
                panic!("the child hangs");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(libc::WIFEXITED(status), "the child was killed: {status:#x}");
        libc::WEXITSTATUS(status)
    }
}

/// The end of a child.
fn leave(code: i32) -> ! {
    // SAFETY: ends the child without running what the parent set up.
    unsafe { libc::_exit(code) }
}

fn is_forked<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::Forked { .. }))
}

/// The child tries everything and drops everything; the parent goes on as if
/// there had been no child.
fn the_parent_goes_on(server: &Server, client: Client) {
    let way = client.transport();
    let counters = client.counters("c", 1, 4).unwrap();
    let events = client.events("e", 1, 4).unwrap();
    let (counter, event) = (counters.at(0, 0).unwrap(), events.at(0, 0).unwrap());
    assert_eq!(counter.fetch_add(1).unwrap(), 0);
    let slots = client.slots("s", 3, 1000).unwrap();
    let [slot, held, left] = [0, 1, 2].map(|row| slots.at(row).unwrap());
    // There is a connection that nobody uses, which the child could take, and
    // there are two in use.
    assert_eq!(slot.write(b"before").unwrap(), 1);
    let (mut writing, mut leaving) = (held.writer().unwrap(), left.writer().unwrap());
    writing.write_at(0, b"wri").unwrap();
    leaving.write_at(0, b"lea").unwrap();
    let memory = client.register(100);
    // While the child is being made, a thread of the parent holds locks.
    let waiting = std::thread::spawn({
        let event = events.at(0, 3).unwrap();
        move || event.wait_timeout(LONG).unwrap()
    });
    eventually("it is parked", || server.parked_waits() == 1);
    let Some(child) = Child::fork() else {
        let mut batch = client.batch();
        batch.fetch_add(&counter, 1).load(&counter);
        let refused = [
            is_forked(counter.fetch_add(1)),
            is_forked(counter.load()),
            is_forked(event.set()),
            is_forked(event.wait_timeout(Duration::from_millis(1))),
            is_forked(events.all().set_all()),
            is_forked(events.all().snapshot()),
            is_forked(batch.run()),
            is_forked(client.list()),
            is_forked(client.info()),
            is_forked(client.counters("d", 1, 1)),
            is_forked(client.remove("c")),
            is_forked(client.join("child")),
            is_forked(client.set_will(&batch)),
            is_forked(client.release()),
            is_forked(slot.write(b"child")),
            is_forked(slot.write_at(1, b"child")),
            is_forked(slot.write_registered(&memory, 0..10)),
            is_forked(slot.writer()),
            is_forked(slot.read(&mut [0; 1000])),
            is_forked(slot.read_newer(0, &mut [0; 1000], Some(Duration::from_millis(1)))),
            is_forked(slot.version()),
            is_forked(slots.versions()),
            is_forked(client.slots("t", 1, 10)),
            is_forked(writing.write_at(3, b"child")),
            is_forked(writing.commit(8)),
            client.transport().name == "none",
            !client.is_connected(),
        ];
        client.close();
        drop((batch, counters, events, counter, event, client));
        drop((slots, slot, held, left, leaving, memory));
        leave(refused.iter().position(|refused| !refused).map_or(0, |at| 1 + at as i32));
    };
    for i in 1..100 {
        assert_eq!(counter.fetch_add(1).unwrap(), i);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(child.wait(), 0, "the number of what was not refused, from 1");
    // The child has used up none of the numbers of writes, and given up none.
    writing.write_at(3, b"ting").unwrap();
    assert_eq!(writing.commit(7).unwrap(), 1);
    leaving.write_at(3, b"ving").unwrap();
    assert_eq!(leaving.commit(7).unwrap(), 1);
    assert_eq!(slot.write(b"after").unwrap(), 2);
    let mut buffer = [0; 1000];
    for (slot, want) in [(&slot, &b"after"[..]), (&held, b"writing"), (&left, b"leaving")] {
        let received = slot.read(&mut buffer).unwrap();
        assert_eq!(&buffer[..received.len], want);
    }
    for i in 100..200 {
        assert_eq!(counter.fetch_add(1).unwrap(), i);
    }
    assert!(event.set().unwrap());
    assert!(!waiting.is_finished());
    events.at(0, 3).unwrap().set().unwrap();
    assert!(waiting.join().unwrap());
    assert_eq!((client.transport(), client.is_connected()), (way, true));
    assert_eq!(server.sessions(), 1);
}

#[test]
fn a_child_leaves_its_parents_session_alone_over_tcp() {
    let _alone = alone();
    let server = server().start().unwrap();
    the_parent_goes_on(&server, client(&server).connect().unwrap());
}

#[test]
fn a_child_leaves_its_parents_session_alone_over_rdma() {
    let _alone = alone();
    if !device() {
        return;
    }
    let server = rdma_server().start().unwrap();
    the_parent_goes_on(&server, over(&server, TransportChoice::Rdma));
}

/// The child's own client keeps its lease, which takes a thread that the child
/// has not inherited.
fn a_child_connects_for_itself(server: &Server, choice: TransportChoice) {
    let mine = over(server, choice);
    let counter = mine.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    let Some(child) = Child::fork() else {
        let client = over(server, choice);
        let theirs = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
        let before = theirs.fetch_add(1).is_ok();
        std::thread::sleep(LEASE * 4);
        leave(i32::from(!before) + 2 * i32::from(theirs.fetch_add(1).is_err()));
    };
    eventually("the child has connected", || server.sessions() == 2);
    let begun = Instant::now();
    while begun.elapsed() < LEASE * 2 {
        assert_eq!(server.sessions(), 2, "after {:?}", begun.elapsed());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(child.wait(), 0);
    assert_eq!(counter.load().unwrap(), 2);
}

const LEASE: Duration = Duration::from_secs(1);

#[test]
fn a_child_connects_for_itself_over_tcp() {
    let _alone = alone();
    let server = server().lease(LEASE).start().unwrap();
    a_child_connects_for_itself(&server, TransportChoice::Tcp);
}

#[test]
fn a_child_connects_for_itself_over_rdma() {
    let _alone = alone();
    if !device() {
        return;
    }
    let server = rdma_server().lease(LEASE).start().unwrap();
    a_child_connects_for_itself(&server, TransportChoice::Rdma);
}

#[test]
fn a_child_leaves_its_parents_server_alone() {
    let _alone = alone();
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    let counter = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    assert_eq!(counter.fetch_add(5).unwrap(), 0);
    let Some(child) = Child::fork() else {
        let refused = is_forked(server.create("other", farcell::Kind::Counter, 8, 8));
        // It has none of the threads that an end would wait for.
        drop(server);
        leave(i32::from(!refused));
    };
    assert_eq!(child.wait(), 0);
    assert_eq!(counter.fetch_add(1).unwrap(), 5);
    assert_eq!(client.list().unwrap().len(), 1);
}

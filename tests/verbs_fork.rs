//! A forked child's handles refuse, the child can open the device for itself,
//! and the parent's connection goes on. One test in a binary of its own, since
//! it forks.

#![allow(unsafe_code, reason = "fork is what is tested")]

mod verbs_support;

use std::sync::atomic::Ordering::Relaxed;

use farcell_sys::libc;

use farcell::verbs::{Access, Completion, Error, Region, Request};
use verbs_support::{ALL, Half, device, pair, remote};

#[test]
fn a_child_reopens_and_the_parent_goes_on() {
    let Some(context) = device() else { return };
    let (client, server) = pair(&context, Half::new(&context), Half::new(&context));
    let cells = Region::pages(&server.domain, 4096, ALL()).unwrap();
    let local = Region::pages(&client.domain, 4096, Access::LOCAL).unwrap();
    let add = || Request::fetch_add(local.slice(0..8).unwrap(), remote(&cells, 0), 1);
    client.run(add()).unwrap();

    // SAFETY: no other thread of this process holds a lock that the child
    // needs; it leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let forked = |result: Result<(), Error>| matches!(result, Err(Error::Forked { .. }));
        let refuses = forked(client.queue.post(add()).map(drop))
            && forked(client.completions.poll(&mut [Completion::default()]).map(drop));
        drop((local, cells, client, server, context));
        let opened = device().is_some_and(|context| {
            let (client, server) = pair(&context, Half::new(&context), Half::new(&context));
            let cells = Region::pages(&server.domain, 4096, ALL()).unwrap();
            let local = Region::pages(&client.domain, 4096, Access::LOCAL).unwrap();
            cells.words()[0].store(5, Relaxed);
            let read = Request::read(local.slice(0..8).unwrap(), remote(&cells, 0));
            client.run(read).is_ok() && local.words()[0].load(Relaxed) == 5
        });
        // SAFETY: ends the child without running what the parent set up.
        unsafe { libc::_exit(i32::from(!refuses) + 2 * i32::from(!opened)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status), "the child was killed: {status:#x}");
    assert_eq!(libc::WEXITSTATUS(status), 0);

    client.run(add()).unwrap();
    assert_eq!(cells.words()[0].load(Relaxed), 2);
}

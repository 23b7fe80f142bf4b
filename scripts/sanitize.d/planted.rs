//! What a sanitizer must find, and what it must not: see scripts/sanitize.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

struct Shared(UnsafeCell<[u64; 8]>);
// SAFETY: it is not so, which is what is to be found.
unsafe impl Sync for Shared {}

/// Two threads change the same word.
fn race() {
    let shared = Arc::new(Shared(UnsafeCell::new([0; 8])));
    let threads: Vec<_> = (0..2)
        .map(|i| {
            let shared = shared.clone();
            thread::Builder::new().name(format!("racer {i}")).spawn(move || {
                // SAFETY: as above.
                (0..1000).for_each(|n| unsafe { (*shared.0.get())[3] += n });
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.unwrap().join().unwrap());
}

/// A flag without an order, behind which a value is read.
fn relaxed() {
    let shared = Arc::new((Shared(UnsafeCell::new([0; 8])), AtomicBool::new(false)));
    let other = shared.clone();
    let writer = thread::spawn(move || {
        // SAFETY: as above.
        unsafe { (*other.0.0.get())[3] = 7 };
        other.1.store(true, Ordering::Relaxed);
    });
    while !shared.1.load(Ordering::Relaxed) {
        thread::yield_now();
    }
    // SAFETY: as above.
    std::hint::black_box(unsafe { (*shared.0.0.get())[3] });
    writer.join().unwrap();
}

/// What is in order, by channels, joins and the last owner of an Arc.
fn order() {
    for _ in 0..200 {
        let shared = Arc::new(vec![3u64; 64]);
        let (send, receive) = mpsc::channel();
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (shared, send) = (shared.clone(), send.clone());
                thread::spawn(move || {
                    send.send(vec![shared.iter().sum::<u64>()]).unwrap();
                    drop(shared);
                    String::from("done")
                })
            })
            .collect();
        drop((shared, send));
        assert_eq!(receive.iter().map(|v| v[0]).sum::<u64>(), 3 * 192);
        threads.into_iter().for_each(|t| assert_eq!(t.join().unwrap(), "done"));
    }
}

/// A word is read behind its end.
fn freed() {
    let boxed = Box::new([5u64; 4]);
    let at: *const u64 = &boxed[1];
    drop(boxed);
    // SAFETY: as above.
    println!("{}", unsafe { at.read_volatile() });
}

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("race") => race(),
        Some("relaxed") => relaxed(),
        Some("order") => order(),
        Some("freed") => freed(),
        other => panic!("{other:?}"),
    }
}

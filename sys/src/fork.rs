//! Telling whether this process was forked since an object was made.
//!
//! A child inherits the bytes of its parent's verbs objects but may not use
//! them: the doorbell pages are not mapped in it, the device would mix both
//! processes' work requests, and closing an object would close the parent's.
//! So each object remembers the [`generation`] it was made in, and refuses
//! when the current one is another.
//!
//! The check is on the path of every operation, so it must cost no system
//! call. One page of memory carries the generation and the kernel's
//! `MADV_WIPEONFORK` (Linux 4.14, see `madvise(2)`), which makes that page
//! read as zero in every child, however it was forked.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The generation that the next process to look gets. In ordinary memory, so
/// a child goes on counting where its parent was.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// What one process, and none of its children, is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Generation(u64);

enum Marker {
    /// A page that is zero after a fork.
    Page(&'static AtomicU64),
    /// The kernel cannot do that: the process id is asked for each time.
    Pid,
}

fn marker() -> &'static Marker {
    static MARKER: OnceLock<Marker> = OnceLock::new();
    MARKER.get_or_init(|| {
        let page = crate::page_size();
        // SAFETY: a new private anonymous mapping touches nothing that exists.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                page,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Marker::Pid;
        }
        // SAFETY: exactly the mapping made above, which nothing else knows.
        if unsafe { libc::madvise(address, page, libc::MADV_WIPEONFORK) } != 0 {
            // SAFETY: as above.
            unsafe { libc::munmap(address, page) };
            return Marker::Pid;
        }
        // SAFETY: page-aligned, zeroed, never unmapped, and from here on only
        // reached as an atomic.
        Marker::Page(unsafe { &*address.cast::<AtomicU64>() })
    })
}

/// The generation of this process. Never blocks; one load, or one system call
/// on kernels before 4.14.
#[must_use]
#[inline]
pub fn generation() -> Generation {
    match marker() {
        Marker::Page(page) => {
            // Relaxed: the value is written once per process and carries no
            // other memory with it.
            let seen = page.load(Ordering::Relaxed);
            if seen != 0 {
                return Generation(seen);
            }
            let mine = NEXT.fetch_add(1, Ordering::Relaxed);
            // Two threads may get here at once; the first one's number counts.
            match page.compare_exchange(0, mine, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => Generation(mine),
                Err(other) => Generation(other),
            }
        }
        Marker::Pid => Generation(u64::from(std::process::id()) | 1 << 63),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_of_another_generation() {
        let mine = generation();
        assert_eq!(mine, generation());
        // SAFETY: the child only reads an atomic and leaves by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let same = generation() == mine;
            // SAFETY: _exit runs no destructor of the parent's.
            unsafe { libc::_exit(i32::from(same)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0);
        assert_eq!(mine, generation(), "the parent's own did not change");
    }
}

//! The memory of the messages of an array of slots.

use super::Segment;
use crate::slot::{HEAD, extent, pitch, spares};
use crate::verbs::Memory;
use farcell_sys::libc;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Locks for the rows: those of one lock have it in turn.
const STRIPES: usize = 16;

/// Who writes a row by way of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The session.
    pub session: u64,
    /// Its own number of the write.
    pub write: u64,
    /// This claim, among all that there ever were.
    pub serial: u64,
    /// What the row was before.
    pub before: crate::slot::Version,
    /// What it is since.
    pub claimed: crate::slot::Version,
    /// Bytes of the row may have been changed.
    pub touched: bool,
    /// They may be changed by RDMA.
    pub remote: bool,
}

/// The claims of rows that share a lock, by row.
pub type Claims = HashMap<u32, Claim>;

/// The rows of one array of slots, each a length and a message, in a sealed
/// memory file of its own, 0 at first, or in a file that outlives the server.
#[derive(Debug)]
pub struct Payload {
    memory: Segment,
    rows: u32,
    bytes: u64,
    claims: [Mutex<Claims>; STRIPES],
    /// Which area each row has. What the memory itself says is for clients.
    areas: Vec<AtomicU32>,
    /// Areas that nobody has had yet begin here.
    next: AtomicU32,
    /// How many areas there are.
    end: u32,
    used: Arc<AtomicU64>,
    limit: u64,
    taken: AtomicU64,
}

impl Payload {
    /// Maps `rows` rows of `bytes` bytes. What it takes is added to `used`, and
    /// taken off again when it is dropped. Memory as [`blank`](Self::blank).
    ///
    /// # Errors
    /// As [`Segment::anonymous`]; `OutOfMemory` if `used` would exceed `limit`.
    pub fn new(rows: u32, bytes: u64, used: &Arc<AtomicU64>, limit: u64) -> io::Result<Payload> {
        let end = rows.saturating_add(spares(rows));
        Payload::with(rows, bytes, end, used, limit, || Payload::blank(rows, bytes))
    }

    /// As [`new`](Self::new) in memory that `make` brings, which has room for
    /// these rows, and where they cannot move: nobody but the server may write to
    /// it without a claim of the server's. Lengths in it are those of the rows.
    ///
    /// # Errors
    /// Those of `make`; `InvalidInput` for too little memory; `OutOfMemory` if
    /// `used` would exceed `limit`, and then `make` is not called.
    pub fn in_memory(
        rows: u32,
        bytes: u64,
        used: &Arc<AtomicU64>,
        limit: u64,
        make: impl FnOnce() -> io::Result<Segment>,
    ) -> io::Result<Payload> {
        Payload::with(rows, bytes, rows, used, limit, make)
    }

    /// As [`new`](Self::new) in memory made by [`blank`](Self::blank), which has
    /// messages in it by now.
    ///
    /// # Errors
    /// As [`in_memory`](Self::in_memory).
    pub fn with_spares(
        rows: u32,
        bytes: u64,
        used: &Arc<AtomicU64>,
        limit: u64,
        memory: Segment,
    ) -> io::Result<Payload> {
        Payload::with(rows, bytes, rows.saturating_add(spares(rows)), used, limit, || Ok(memory))
    }

    /// A sealed memory file with room for such rows, all 0. Pages are taken when
    /// first touched.
    ///
    /// # Errors
    /// As [`Segment::anonymous`].
    pub fn blank(rows: u32, bytes: u64) -> io::Result<Segment> {
        let all = usize::try_from(extent(rows.saturating_add(spares(rows)), bytes));
        Segment::sealed(c"farcell slots", all.map_err(|_| io::ErrorKind::InvalidInput)?, false)
    }

    /// Puts a message that is `length` bytes long into memory made for such rows:
    /// its length, and these of its bytes, from a whole word on. Nobody else may
    /// see the memory yet. `false`: that is not inside of the memory.
    pub fn fill(memory: &Segment, row: u32, most: u64, length: u64, at: u64, bytes: &[u8]) -> bool {
        let end = at.checked_add(bytes.len() as u64);
        let start = pitch(most).checked_mul(row.into());
        let (Some(start), Some(_)) = (start, end.filter(|&end| end <= length && length <= most))
        else {
            return false;
        };
        let words = usize::try_from(start / 8).ok().and_then(|at| memory.words().get(at..));
        let row = words.and_then(|words| words.get(..(pitch(most) / 8) as usize));
        let Some(row) = row.filter(|_| at.is_multiple_of(8)) else { return false };
        // Relaxed, here and below: nobody else looks.
        row[0].store(length, Ordering::Relaxed);
        let words = &row[((HEAD + at) / 8) as usize..];
        for (word, bytes) in words.iter().zip(bytes.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(whole), Ordering::Relaxed);
        }
        true
    }

    fn with(
        rows: u32,
        bytes: u64,
        end: u32,
        used: &Arc<AtomicU64>,
        limit: u64,
        make: impl FnOnce() -> io::Result<Segment>,
    ) -> io::Result<Payload> {
        let taken = extent(rows, bytes);
        // Relaxed: a sum, and nothing is published by it.
        let order = Ordering::Relaxed;
        used.fetch_update(order, order, |sum| sum.checked_add(taken).filter(|&sum| sum <= limit))
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let enough = |memory: &Segment| memory.bytes as u64 >= extent(end, bytes);
        let made = make().and_then(|memory| match enough(&memory) {
            true => Ok(memory),
            false => Err(io::ErrorKind::InvalidInput.into()),
        });
        let memory = made.inspect_err(|_| {
            used.fetch_sub(taken, order);
        })?;
        let claims = Default::default();
        let areas = (0..rows).map(AtomicU32::new).collect();
        let (used, next, taken) = (used.clone(), AtomicU32::new(rows), AtomicU64::new(taken));
        Ok(Payload { memory, rows, bytes, claims, areas, next, end, used, limit, taken })
    }

    /// Where a row begins, in bytes.
    fn start(&self, row: u32) -> u64 {
        // Relaxed: it changes while the row is claimed, and the version word
        // orders that.
        u64::from(self.areas[row as usize].load(Ordering::Relaxed)) * pitch(self.bytes)
    }

    /// Gives the row an area that nobody has had, since someone may still write
    /// to the one that it has. Its bytes are lost. Whoever calls this has claimed
    /// the row and holds its [claims](Self::claims). `false`: there is none left.
    pub fn relocate(&self, row: u32) -> bool {
        // Relaxed, all of it: see `start`, and `new`.
        let order = Ordering::Relaxed;
        let (end, more) = (self.end, pitch(self.bytes));
        let free = |next: u32| (next < end).then(|| next + 1);
        let fits = |sum: u64| sum.checked_add(more).filter(|&sum| sum <= self.limit);
        if self.used.fetch_update(order, order, fits).is_err() {
            return false;
        }
        let Ok(area) = self.next.fetch_update(order, order, free) else {
            self.used.fetch_sub(more, order);
            return false;
        };
        self.taken.fetch_add(more, order);
        self.areas[row as usize].store(area, order);
        let first = u64::from(row) * more / 8;
        self.memory.words()[first as usize + 1].store(u64::from(area) + 1, order);
        true
    }

    /// The file that it is in.
    ///
    /// # Errors
    /// None in a server, which does not close it.
    pub fn file(&self) -> io::Result<&File> {
        self.memory.file()
    }

    /// As [`Segment::read_only_file`].
    ///
    /// # Errors
    /// As there.
    pub fn read_only_file(&self) -> io::Result<File> {
        self.memory.read_only_file()
    }

    /// As [`Segment::is_sealed`].
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.memory.is_sealed()
    }

    /// Most bytes of a message.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The claims of this row and of those that share its lock. Who holds them
    /// is the only one to change bytes or claims of these rows by way of the
    /// server.
    pub fn claims(&self, row: u32) -> MutexGuard<'_, Claims> {
        let claims = &self.claims[row as usize % STRIPES];
        claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes away every claim of a session.
    pub fn take_claims(&self, session: u64) -> Vec<(u32, Claim)> {
        let all = self.claims.iter();
        let locked = all.map(|claims| claims.lock().unwrap_or_else(PoisonError::into_inner));
        locked
            .flat_map(|mut claims| {
                let taken: Vec<_> = claims.extract_if(|_, c| c.session == session).collect();
                taken
            })
            .collect()
    }

    /// The length of the row's message.
    ///
    /// # Panics
    /// The row is none: whoever asks has checked it.
    #[must_use]
    pub fn length(&self, row: u32) -> &AtomicU64 {
        assert!(row < self.rows);
        &self.memory.words()[(self.start(row) / 8) as usize]
    }

    /// Where these bytes of a row are; `None` outside of the row.
    fn place(&self, row: u32, at: u64, len: usize) -> Option<NonNull<u8>> {
        let end = at.checked_add(len as u64)?;
        if row >= self.rows || end > self.bytes {
            return None;
        }
        let offset = self.start(row) + HEAD + at;
        // SAFETY: bytes, and the number of areas, of which the row has one, are
        // those that the mapping was made for, so this is inside of it.
        Some(unsafe { self.memory.address().add(offset as usize) })
    }

    /// As [`receive`](Self::receive) for the claim with this number. `None`: it
    /// stands no more, and nothing was received.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn receive_for(
        &self,
        serial: u64,
        row: u32,
        at: u64,
        len: usize,
        from: BorrowedFd<'_>,
    ) -> io::Result<Option<usize>> {
        // Held while the system copies: nobody else gets the row meanwhile.
        let mut claims = self.claims(row);
        let Some(claim) = claims.get_mut(&row).filter(|claim| claim.serial == serial) else {
            return Ok(None);
        };
        claim.touched = true;
        self.receive(row, at, len, from).map(Some)
    }

    /// Lets the system put what a socket has into a row, `len` bytes at most,
    /// as recv(2) without waiting. 0 bytes: the other side is closed.
    ///
    /// # Errors
    /// As recv(2); `InvalidInput` for bytes outside of the row.
    fn receive(&self, row: u32, at: u64, len: usize, from: BorrowedFd<'_>) -> io::Result<usize> {
        let place = self.place(row, at, len).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: `len` bytes from there on are mapped for as long as `self`,
        // and no reference to plain data in them exists (see `Segment`).
        let n =
            unsafe { libc::recv(from.as_raw_fd(), place.as_ptr().cast(), len, libc::MSG_DONTWAIT) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    /// Lets the system send bytes of a row, as send(2) without waiting; `more`
    /// says that something follows at once.
    ///
    /// # Errors
    /// As send(2); `InvalidInput` for bytes outside of the row.
    pub fn send(
        &self,
        row: u32,
        at: u64,
        len: usize,
        more: bool,
        to: BorrowedFd<'_>,
    ) -> io::Result<usize> {
        let place = self.place(row, at, len).ok_or(io::ErrorKind::InvalidInput)?;
        let more = if more { libc::MSG_MORE } else { 0 };
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | more;
        // SAFETY: as in `receive`. The system copies them in whatever state
        // they are; the reader finds out by the version word.
        let n = unsafe { libc::send(to.as_raw_fd(), place.as_ptr().cast(), len, flags) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    /// Copies bytes of a row out, from a whole word on; a mix if someone writes
    /// meanwhile. `false`: they are not inside of the row.
    pub fn copy(&self, row: u32, at: u64, into: &mut [u8]) -> bool {
        let end = at.checked_add(into.len() as u64).filter(|&end| end <= self.bytes);
        if row >= self.rows || end.is_none() || !at.is_multiple_of(8) {
            return false;
        }
        let first = (self.start(row) + HEAD + at) / 8;
        let words = &self.memory.words()[first as usize..];
        let (whole, rest) = into.as_chunks_mut::<8>();
        let last = words.get(whole.len());
        // Relaxed, here and below: the version word orders it.
        for (bytes, word) in whole.iter_mut().zip(words) {
            *bytes = word.load(Ordering::Relaxed).to_le_bytes();
        }
        if let Some(word) = last.filter(|_| !rest.is_empty()) {
            let bytes = word.load(Ordering::Relaxed).to_le_bytes();
            rest.copy_from_slice(&bytes[..rest.len()]);
        }
        true
    }

    /// The words of the whole memory, and where these bytes of a row are in it.
    fn words(&self, row: u32, at: u64, len: usize) -> io::Result<(&[AtomicU64], usize)> {
        self.place(row, at, len).ok_or(io::ErrorKind::InvalidInput)?;
        Ok((self.memory.words(), (self.start(row) + HEAD + at) as usize))
    }

    /// Puts bytes into a row for the claim with this number. `false`: it stands no
    /// more, and nothing was put.
    ///
    /// # Errors
    /// `InvalidInput` for bytes outside of the row.
    pub fn put_for(&self, serial: u64, row: u32, at: u64, bytes: &[u8]) -> io::Result<bool> {
        // Held meanwhile, as in `receive_for`.
        let mut claims = self.claims(row);
        let Some(claim) = claims.get_mut(&row).filter(|claim| claim.serial == serial) else {
            return Ok(false);
        };
        let (words, start) = self.words(row, at, bytes.len())?;
        claim.touched = true;
        super::words::store(words, start, bytes);
        Ok(true)
    }

    /// Copies bytes of a row out; a mix if someone writes meanwhile, which the
    /// version word tells.
    ///
    /// # Errors
    /// `InvalidInput` for bytes outside of the row.
    pub fn copy_out(&self, row: u32, at: u64, into: &mut [u8]) -> io::Result<()> {
        let (words, start) = self.words(row, at, into.len())?;
        super::words::load(words, start, into);
        Ok(())
    }

    /// Copies bytes of a row out; a mix if someone writes meanwhile. `false`:
    /// they are not inside of the row.
    #[cfg(test)]
    pub fn read(&self, row: u32, at: u64, into: &mut [u8]) -> bool {
        let Some(place) = self.place(row, at, into.len()) else {
            return false;
        };
        for (i, byte) in into.iter_mut().enumerate() {
            // SAFETY: inside of the row, mapped, and reached by atomics only.
            // Relaxed: the version word orders it.
            *byte = unsafe { place.add(i).cast::<std::sync::atomic::AtomicU8>().as_ref() }
                .load(Ordering::Relaxed);
        }
        true
    }
}

// SAFETY: that of the segment inside.
unsafe impl Memory for Payload {
    fn address(&self) -> NonNull<u8> {
        self.memory.address()
    }

    /// As far as rows go that have never moved: for adapters, which pin it.
    fn len(&self) -> usize {
        let rows = extent(self.rows, self.bytes) as usize;
        rows.next_multiple_of(4096).min(self.memory.len())
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        // Relaxed: see `new`.
        self.used.fetch_sub(*self.taken.get_mut(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn nothing_outside_of_a_row_is_touched() {
        let used = Arc::default();
        let payload = Payload::new(2, 10, &used, 1 << 20).unwrap();
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(b"0123456789abcdef").unwrap();
        for (row, at, len) in [(2, 0, 1), (0, 10, 1), (1, u64::MAX, 2), (1, 5, 6)] {
            let refused = payload.receive(row, at, len, theirs.as_fd()).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
            let refused = payload.send(row, at, len, false, theirs.as_fd()).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        }
        assert_eq!(payload.receive(1, 4, 6, theirs.as_fd()).unwrap(), 6);
        let mut row = [0; 10];
        assert!(payload.read(1, 0, &mut row));
        assert_eq!(&row, b"\0\0\0\x00012345");
        assert!(payload.read(0, 0, &mut row));
        assert_eq!(row, [0; 10]);
        assert_eq!(payload.length(1).load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_row_that_moves_leaves_its_bytes_behind() {
        let used = Arc::default();
        let payload = Payload::new(2, 10, &used, 64 * 2 * 5).unwrap();
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(b"012345").unwrap();
        assert_eq!(payload.receive(1, 0, 6, theirs.as_fd()).unwrap(), 6);
        let words = payload.memory.words();
        let place = |row: usize| words[row * 16 + 1].load(Ordering::Relaxed);
        let mut row = [0; 6];
        // The limit lets three of the four areas be used.
        for area in 2..5 {
            assert!(payload.relocate(1));
            assert_eq!((place(0), place(1)), (0, area + 1));
            assert!(payload.read(1, 0, &mut row));
            assert_eq!(row, [0; 6]);
            ours.write_all(b"012345").unwrap();
            assert_eq!(payload.receive(1, 0, 6, theirs.as_fd()).unwrap(), 6);
        }
        assert!(!payload.relocate(0) && place(0) == 0);
        drop(payload);
        assert_eq!(used.load(Ordering::Relaxed), 0);
        let payload = Payload::new(2, 10, &used, 1 << 20).unwrap();
        assert_eq!([0; 5].map(|_| payload.relocate(0)), [true, true, true, true, false]);
    }

    #[test]
    fn the_limit_holds_and_comes_back() {
        let used = Arc::default();
        let payload = Payload::new(1, 4096 * 3 - HEAD, &used, 4096 * 4).unwrap();
        let kind = |rows| Payload::new(rows, 4096 * 2, &used, 4096 * 4).unwrap_err().kind();
        assert_eq!(kind(1), io::ErrorKind::OutOfMemory);
        assert_eq!(kind(u32::MAX), io::ErrorKind::OutOfMemory);
        drop(payload);
        assert_eq!(used.load(Ordering::Relaxed), 0);
    }
}

//! The shared-memory handshake: what a server may answer, and what may come to
//! the server's socket.

use super::map::Window;
use crate::fuzz::Input;
use crate::layout::{CELLS_AT, MAGIC_WORD, header};
use crate::wire::ShmRecord;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

const INCARNATION: u64 = 9;

/// A file of that size, perhaps one that can be cut short.
fn file(size: u64, sealed: bool, capacity: u64) -> Option<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("fuzz", flags).ok()?;
    ftruncate(&file, size).ok()?;
    for (at, word) in [
        (header::MAGIC, MAGIC_WORD),
        (header::INCARNATION, INCARNATION),
        (header::CAPACITY, capacity),
    ] {
        let at = at as u64 * 8;
        if at + 8 <= size {
            rustix::io::pwrite(&file, &word.to_le_bytes(), at).ok()?;
        }
    }
    if sealed {
        fcntl_add_seals(&file, SealFlags::SHRINK).ok()?;
    }
    Some(file)
}

/// Files and a record of anyone's: what is mapped has every cell that it says.
/// Then datagrams of anyone to a server: memory goes to tokens alone.
pub fn memory(data: &[u8]) {
    let mut input = Input(data);
    let [flags, files, writable, sealed] = input.array();
    let capacity = u64::from(u16::from_le_bytes(input.array()));
    let said = if flags & 1 == 0 { capacity } else { u64::from_le_bytes(input.array()) };
    let mut sizes = [0; 3];
    let mut made = Vec::new();
    for (at, size) in sizes.iter_mut().enumerate() {
        let pages = u64::from(input.byte() % 160);
        let real = pages * 4096 + if input.byte() == 1 { 8 } else { 0 };
        *size = if flags & (2 << at) == 0 { real } else { u64::from_le_bytes(input.array()) };
        let sealed = input.byte() != 1;
        let in_header = if flags & 16 == 0 { said } else { capacity ^ 1 };
        match file(real, sealed, in_header) {
            Some(file) if at < usize::from(files % 4) => made.push(file),
            _ => {}
        }
    }
    let record = ShmRecord {
        segment: sizes[0],
        watched: sizes[1],
        desk: sizes[2],
        writable,
        sealed,
        ..bytemuck::Zeroable::zeroed()
    };
    let incarnation = if flags & 32 == 0 { INCARNATION } else { 1 };
    if let Ok(window) = Window::open(&made, &record, said, incarnation) {
        assert!(incarnation == INCARNATION && made.len() == 2 + usize::from(writable != 0));
        let cells = u32::try_from(said).expect("a segment that large is refused");
        for place in [0, cells / 2, cells.saturating_sub(1)] {
            if place < cells {
                // The pages behind the last cell are there as well.
                let cell = window.cell(place).expect("a cell that was promised");
                cell.load(Ordering::Relaxed);
                assert!(!window.is_watched(place));
                drop(window.announce(place));
            }
        }
        assert!(window.cell(cells).is_none() && window.cell(u32::MAX).is_none());
        assert!(sizes[0] >= CELLS_AT as u64 + said * 8);
        window.empty();
    }
    crate::server::fuzz::tokens(&mut input);
}

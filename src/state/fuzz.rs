//! Files of a state folder, and snapshots, with anything in them under a seal
//! that is right.

use super::record::{Head, VERSION};
use super::{catalog, sessions, snapshot};
use crate::auth::Access;
use crate::catalog::{Catalog, Placed};
use crate::engine::{Engine, Newcomer, Out, check_former};
use crate::fuzz::Input;
use crate::segment::Segment;
use rustix::fs::{MemfdFlags, memfd_create};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Write;
use std::time::Duration;

const CAPACITY: u32 = 512;
const LEASE: Duration = Duration::from_secs(1);

/// A file of changes, its seal as it should be.
fn seal(head: Head, changes: &[u8]) -> Vec<u8> {
    let head = bytemuck::bytes_of(&head);
    let digest = Sha256::new().chain_update(head).chain_update(changes).finalize();
    [head, &(changes.len() as u64).to_le_bytes(), &digest, changes].concat()
}

fn head(magic: [u8; 8], capacity: u32) -> Head {
    Head { magic, version: VERSION, capacity, state: 7, life: 1, time: 0 }
}

/// The catalog and the sessions of a state folder. What can be read can be
/// taken up by a server, and ends with its lease.
pub fn sealed(data: &[u8]) {
    // As it is: nobody who does not know the seal gets in.
    let _ = catalog::read(data);
    let mut input = Input(data);
    let [lo, hi] = input.array();
    let arrays = input.bytes(usize::from(u16::from_le_bytes([lo, hi])));
    let catalog_file = seal(head(*b"farcellC", CAPACITY), arrays);
    let Ok((catalog_head, arrays)) = catalog::read(&catalog_file) else {
        return;
    };
    // As it is written anew.
    let again = seal(catalog_head, &arrays.to_bytes());
    assert_eq!(catalog::read(&again).ok(), Some((catalog_head, arrays.clone())));
    let placed: Vec<Placed> = arrays.arrays.values().cloned().collect();
    let Ok(catalog) = Catalog::restore(CAPACITY, placed, &arrays.held) else {
        return;
    };
    let _ = sessions::Sessions::read(input.0, &catalog_head);
    let sessions_file = seal(head(*b"farcellP", CAPACITY), input.0);
    let Ok(read) = sessions::Sessions::read(&sessions_file, &catalog_head) else {
        return;
    };
    let formers = read.formers();
    for former in formers.sessions.values() {
        assert_eq!(check_former(former, CAPACITY), Ok(()));
    }
    let wanted =
        formers.sessions.values().map(|former| (former.session, former.access)).min_by_key(|f| f.0);
    let lived = formers.sessions.len();
    let Ok(segment) = Segment::anonymous(CAPACITY) else {
        return;
    };
    let engine = Engine::with_catalog(segment, catalog, LEASE).slot_bytes(1 << 14);
    engine.take_over(formers, None);
    assert_eq!(engine.sessions(), lived);
    let mut out = Out::default();
    if let Some((session, access)) = wanted {
        let newcomer =
            Newcomer { access, resume: Some(session), next_request: 1, fresh: 1, route: 1 };
        let taken = engine.take_up(&newcomer, Duration::ZERO, &mut out);
        assert_eq!(taken.map(|attached| attached.id), Some(session));
        let other = match access {
            Access::ReadWrite => Access::ReadOnly,
            Access::ReadOnly => Access::ReadWrite,
        };
        let newcomer = Newcomer { access: other, ..newcomer };
        assert!(engine.take_up(&newcomer, Duration::ZERO, &mut out).is_none(), "another's session");
    }
    engine.expire(LEASE + Duration::from_millis(1), &mut out);
    for over in std::mem::take(&mut out.ended) {
        engine.end_writes(over.id, &mut out);
        engine.settle(over.id, LEASE, &mut out);
    }
    assert_eq!(engine.sessions(), 0, "a session without a lease");
}

/// A snapshot. What can be read has all its cells inside of the file.
pub fn snapshot(data: &[u8]) {
    let mut input = Input(data);
    let [raw] = input.array();
    let mut bytes = Vec::new();
    if raw & 1 == 0 {
        let capacity = u32::from_le_bytes(input.array());
        let table_at = u64::from(u16::from_le_bytes(input.array()));
        let arrays = u64::from(input.byte());
        bytes.extend_from_slice(bytemuck::bytes_of(&head(snapshot::MAGIC, capacity)));
        bytes.extend_from_slice(input.0);
        bytes.extend_from_slice(b"farcellE");
        bytes.extend_from_slice(&table_at.to_le_bytes());
        bytes.extend_from_slice(&arrays.to_le_bytes());
        bytes.extend_from_slice(&u64::from(raw >> 1 & 1).to_le_bytes());
        let digest = Sha256::digest(&bytes);
        bytes.extend_from_slice(&digest);
    } else {
        bytes.extend_from_slice(input.0);
    }
    let Ok(file) = memfd_create("fuzz", MemfdFlags::CLOEXEC) else {
        return;
    };
    let mut file = File::from(file);
    if file.write_all(&bytes).is_err() {
        return;
    }
    let Ok(Ok(read)) = snapshot::check(file) else {
        return;
    };
    assert!(raw & 1 == 0, "a checksum was guessed");
    let mut words = 0;
    let copied = read.cells(|place, part| {
        words += part.len();
        assert!(u64::from(place) + part.len() as u64 <= u64::from(read.head.capacity));
    });
    assert!(copied.is_ok(), "the cells of an array are not in the file");
    assert!(words * 8 <= bytes.len() * read.arrays.len());
}

//! Records about what a server has.

use bytemuck::{Pod, Zeroable};

/// An array in a list; `name_len` bytes of name follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ListRecord {
    /// A [`Kind`](crate::catalog::Kind).
    pub kind: u8,
    /// Bytes of the name behind this.
    pub name_len: u8,
    /// 0.
    pub reserved: u16,
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
    /// 0.
    pub reserved_too: u32,
    /// What else belongs to the kind; 0 for events and counters.
    pub param: u64,
}

/// What the server tells of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct InfoRecord {
    /// Cells of the segment.
    pub capacity: u64,
    /// Cells that no array has.
    pub free: u64,
    /// Cells of the largest free piece.
    pub largest: u64,
    /// Sessions that live.
    pub sessions: u32,
    /// Arrays that exist.
    pub arrays: u32,
    /// Waits that are parked.
    pub parked: u32,
    /// 0.
    pub reserved: u32,
}

//! Where things stand in the segment. Pure arithmetic.
//!
//! Cells of a row are dense (8 bytes apart): NIC atomics hash addresses to a
//! few hundred lock slots, and padding each cell to a cache line makes cells
//! collide there. The pitch from row to row is an odd number of cache lines,
//! so that a column does not fall into one set of a cache and the pitch is
//! never a multiple of 4096 bytes.

/// Cells in a cache line of 64 bytes.
pub const CELLS_PER_LINE: u32 = 8;

/// Bytes of the header, at the front of the segment: a page, which clients can
/// read only.
pub const HEADER_BYTES: usize = 4096;

/// Bytes of the segment before its first cell: the header, and a page with the
/// scratch word.
pub const CELLS_AT: usize = 2 * HEADER_BYTES;

/// First word of the header: says that this is a segment, and the byte order.
pub const MAGIC_WORD: u64 = u64::from_le_bytes(*b"farcell\x01");

/// Words of the header, by their index.
pub mod header {
    /// [`MAGIC_WORD`](super::MAGIC_WORD).
    pub const MAGIC: usize = 0;
    /// Which life of the server this is.
    pub const INCARNATION: usize = 1;
    /// Cells of the segment.
    pub const CAPACITY: usize = 2;
    /// Of a desk: not 0 when its session is over.
    pub const OVER: usize = 3;
    /// In the page behind the header, which clients can change: a word for them
    /// to try their atomics on. It means nothing to anyone else.
    pub const SCRATCH: usize = super::HEADER_BYTES / 8;
}

/// Most cells that a segment can have: 2^31 (16 GiB).
pub const MAX_CELLS: u32 = 1 << 31;

/// Rows and columns of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows, at least 1.
    pub rows: u32,
    /// Columns, at least 1.
    pub cols: u32,
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} x {}", self.rows, self.cols)
    }
}

impl Shape {
    /// Cells from the start of a row to the start of the next. An array of
    /// one row needs no padding between rows.
    #[must_use]
    pub const fn pitch(self) -> u64 {
        let lines = (self.cols as u64).div_ceil(CELLS_PER_LINE as u64);
        let lines = if self.rows > 1 { lines | 1 } else { lines };
        lines * CELLS_PER_LINE as u64
    }

    /// Cells that the array takes up in the segment, padding included.
    #[must_use]
    pub const fn extent(self) -> u64 {
        // Below 2^32 * (2^32 + 16) cells, which saturates instead of wrapping.
        (self.rows as u64).saturating_mul(self.pitch())
    }

    /// Cells that a user sees: rows times columns.
    #[must_use]
    pub const fn cells(self) -> u64 {
        self.rows as u64 * self.cols as u64
    }

    /// The cell's place, counted in cells from the start of the array, or
    /// `None` outside of the array.
    #[must_use]
    pub const fn offset(self, row: u32, col: u32) -> Option<u32> {
        if row >= self.rows || col >= self.cols {
            return None;
        }
        // An array that exists has an extent of at most MAX_CELLS.
        Some((row as u64 * self.pitch() + col as u64) as u32)
    }
}

/// Cells of one array at equal distances: a row has stride 1, a column has
/// the pitch as its stride, one cell is a run of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first cell, counted from the start of the array.
    pub offset: u32,
    /// How many cells.
    pub count: u32,
    /// From one to the next.
    pub stride: u32,
}

impl Run {
    /// A run of one cell.
    #[must_use]
    pub const fn one(offset: u32) -> Run {
        Run { offset, count: 1, stride: 1 }
    }

    /// Whether the run is not empty and every cell of it lies below `extent`.
    #[must_use]
    pub const fn fits(self, extent: u32) -> bool {
        self.count > 0
            && (self.offset as u64 + (self.count as u64 - 1) * self.stride as u64) < extent as u64
    }

    /// The offsets of its cells, in order.
    pub fn offsets(self) -> impl Iterator<Item = u32> + Clone {
        (0..self.count).map(move |i| self.offset + i * self.stride)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pitch_is_an_odd_number_of_lines(rows in 2u32.., cols in 1u32..) {
            let pitch = Shape { rows, cols }.pitch();
            prop_assert!(pitch >= u64::from(cols));
            prop_assert_eq!(pitch % 8, 0);
            prop_assert_eq!(pitch / 8 % 2, 1);
            prop_assert_ne!(pitch * 8 % 4096, 0);
        }

        #[test]
        fn no_two_cells_share_a_place(rows in 1u32..40, cols in 1u32..40) {
            let shape = Shape { rows, cols };
            let mut seen = std::collections::HashSet::new();
            for r in 0..rows {
                for c in 0..cols {
                    let at = shape.offset(r, c).unwrap();
                    prop_assert!(u64::from(at) < shape.extent());
                    prop_assert!(seen.insert(at));
                }
            }
            prop_assert_eq!(shape.offset(rows, 0), None);
            prop_assert_eq!(shape.offset(0, cols), None);
        }

        #[test]
        fn a_run_that_fits_stays_inside(offset: u32, count: u32, stride: u32, extent in 1u32..=MAX_CELLS) {
            let run = Run { offset, count, stride };
            let last = u128::from(offset) + u128::from(count.max(1) - 1) * u128::from(stride);
            prop_assert_eq!(run.fits(extent), count > 0 && last < u128::from(extent));
        }
    }

    #[test]
    fn the_largest_shapes_do_not_wrap() {
        let shape = Shape { rows: u32::MAX, cols: u32::MAX };
        assert!(shape.extent() > shape.cells() || shape.extent() == u64::MAX);
        assert_eq!(Shape { rows: 1, cols: 10 }.extent(), 16);
    }
}

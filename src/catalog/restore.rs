//! A catalog as it was in a former life of the server. Pure.

use super::{Catalog, Entry, Form, MAX_ARRAYS, NameError, check_name};
use crate::layout::CELLS_PER_LINE;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

/// An array and where it stands, as written down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Its name.
    pub name: String,
    /// Its kind and shape.
    pub form: Form,
    /// Its first cell.
    pub base: u32,
}

impl From<&Entry> for Placed {
    fn from(entry: &Entry) -> Placed {
        Placed { name: entry.name.clone(), form: entry.form, base: entry.base }
    }
}

/// Why arrays that were written down cannot be those of a catalog.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// Not the name of an array.
    #[error("an array has a name that is none: {0}")]
    Name(NameError),
    /// Two arrays of one name.
    #[error("two arrays are called {0:?}")]
    Twice(String),
    /// A shape without cells, or a parameter that the kind does not have.
    #[error("array {0:?} has a shape or parameter that its kind cannot have")]
    Form(String),
    /// Some of the cells are not there, or do not begin on a cache line.
    #[error("the cells of array {0:?} are not all in the segment")]
    Place(String),
    /// Cells that belong to two.
    #[error("arrays {0:?} and {1:?} share cells")]
    Overlap(String, String),
    /// More than [`MAX_ARRAYS`].
    #[error("there are more than {MAX_ARRAYS} arrays")]
    TooMany,
}

impl Placed {
    /// Its cells, if they are a place in a segment of `capacity` cells, and
    /// everything else about it is possible too.
    fn check(&self, capacity: u32) -> Result<u32, Damage> {
        let Placed { name, form, base } = self;
        check_name(name).map_err(Damage::Name)?;
        if form.shape.cells() == 0 || form.kind.first_word(form.param).is_none() {
            return Err(Damage::Form(name.clone()));
        }
        let extent = form.shape.extent();
        if base % CELLS_PER_LINE != 0
            || u64::from(*base).saturating_add(extent) > u64::from(whole_lines(capacity))
        {
            return Err(Damage::Place(name.clone()));
        }
        Ok(extent as u32)
    }
}

fn whole_lines(capacity: u32) -> u32 {
    capacity - capacity % CELLS_PER_LINE
}

impl Catalog {
    /// A catalog of these arrays, all of them checked before one is taken. The
    /// cells of `held`, places and lengths, were those of removed arrays that
    /// some client could still reach: unless an array has them by now they stay
    /// out of use until [`end_quarantine`](Self::end_quarantine).
    ///
    /// # Errors
    /// What makes them impossible.
    pub fn restore(
        capacity: u32,
        placed: Vec<Placed>,
        held: &[(u32, u32)],
    ) -> Result<Catalog, Damage> {
        if placed.len() > MAX_ARRAYS {
            return Err(Damage::TooMany);
        }
        let mut catalog = Catalog::new(capacity);
        let mut by_place: BTreeMap<u32, Arc<Entry>> = BTreeMap::new();
        for placed in placed {
            let extent = placed.check(capacity)?;
            let Placed { name, form, base } = placed;
            let alive = AtomicBool::new(true);
            // Made by the engine, which knows how much memory there is.
            let payload = OnceLock::new();
            let holders = Arc::default();
            let entry = Arc::new(Entry { name, form, base, extent, payload, alive, holders });
            if let Some(before) = catalog.arrays.insert(entry.name.clone(), entry.clone()) {
                return Err(Damage::Twice(before.name.clone()));
            }
            if let Some(other) = by_place.insert(base, entry.clone()) {
                return Err(Damage::Overlap(other.name.clone(), entry.name.clone()));
            }
        }
        for (left, right) in by_place.values().zip(by_place.values().skip(1)) {
            // No overflow: both end inside of the capacity.
            if left.base + left.extent > right.base {
                return Err(Damage::Overlap(left.name.clone(), right.name.clone()));
            }
        }
        let mut at = 0;
        catalog.free.clear();
        for entry in by_place.values() {
            if entry.base > at {
                catalog.free.insert(at, entry.base - at);
            }
            at = entry.base + entry.extent;
        }
        if whole_lines(capacity) > at {
            catalog.free.insert(at, whole_lines(capacity) - at);
        }
        for &(base, len) in held {
            catalog.set_aside(base, len);
        }
        Ok(catalog)
    }

    /// Takes what is free of these cells out of use.
    fn set_aside(&mut self, base: u32, len: u32) {
        let end = base.saturating_add(len);
        let pieces: Vec<(u32, u32)> = self.free.range(..end).map(|(&b, &n)| (b, n)).collect();
        for (at, n) in pieces {
            let (from, to) = (at.max(base), (at + n).min(end));
            if from >= to {
                continue;
            }
            self.free.remove(&at);
            if from > at {
                self.free.insert(at, from - at);
            }
            if to < at + n {
                self.free.insert(to, at + n - to);
            }
            self.quarantined.push((from, to - from));
        }
    }

    /// Whether cells of a former life are out of use.
    #[must_use]
    pub fn has_quarantine(&self) -> bool {
        !self.quarantined.is_empty()
    }

    /// Nobody of the former life can reach the cells of its removed arrays any
    /// more: gives them back.
    pub fn end_quarantine(&mut self) {
        for (base, len) in std::mem::take(&mut self.quarantined) {
            self.release(base, len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Kind;
    use super::*;
    use crate::layout::Shape;
    use proptest::prelude::*;

    fn placed(name: &str, rows: u32, cols: u32, base: u32) -> Placed {
        let form = Form { kind: Kind::Event, shape: Shape { rows, cols }, param: 0 };
        Placed { name: name.to_owned(), form, base }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let restore = |placed: &[Placed]| Catalog::restore(100, placed.to_vec(), &[]).unwrap_err();
        assert!(matches!(restore(&[placed("a b", 1, 1, 0)]), Damage::Name(_)));
        assert!(matches!(restore(&[placed("a", 0, 1, 0)]), Damage::Form(_)));
        assert!(matches!(restore(&[placed("a", 1, 8, 96)]), Damage::Place(_)));
        assert!(matches!(restore(&[placed("a", 1, 8, 4)]), Damage::Place(_)));
        assert!(matches!(restore(&[placed("a", u32::MAX, u32::MAX, 0)]), Damage::Place(_)));
        assert!(matches!(
            restore(&[placed("a", 1, 8, 0), placed("a", 1, 8, 8)]),
            Damage::Twice(name) if name == "a"
        ));
        for base in [0, 8] {
            let two = [placed("a", 1, 16, 0), placed("b", 1, 8, base)];
            assert!(matches!(restore(&two), Damage::Overlap(..)), "{base}");
        }
    }

    #[test]
    fn held_cells_come_back_later() {
        let arrays = vec![placed("a", 1, 8, 16)];
        let mut c = Catalog::restore(64, arrays, &[(8, 16), (40, 8), (56, 100)]).unwrap();
        assert_eq!(c.free_cells(), (32, 16));
        assert!(c.has_quarantine());
        c.end_quarantine();
        assert!(!c.has_quarantine());
        assert_eq!(c.free_cells(), (56, 40));
    }

    proptest! {
        #[test]
        fn a_catalog_is_the_one_that_was_written_down(ops in prop::collection::vec((0u8..12, 1u32..6, 1u32..20, any::<bool>()), 1..60), capacity in 500u32..600) {
            let mut c = Catalog::new(capacity);
            for (n, rows, cols, open) in ops {
                let name = format!("a{n}");
                let form = placed(&name, rows, cols, 0).form;
                if open { let _ = c.open_or_create(&name, form, || Ok(None)); } else { let _ = c.remove(&name, false); }
            }
            let written: Vec<Placed> = c.list("", usize::MAX).map(|e| Placed::from(&**e)).collect();
            let again = Catalog::restore(capacity, written.clone(), &[]).unwrap();
            let read: Vec<Placed> = again.list("", usize::MAX).map(|e| Placed::from(&**e)).collect();
            prop_assert_eq!(read, written);
            prop_assert_eq!(&again.free, &c.free);
        }

        #[test]
        fn no_two_arrays_share_a_cell_whatever_was_written(arrays in prop::collection::vec((0u8..9, 0u32..9, 0u32..40, any::<u32>()), 0..8), near: bool) {
            let arrays = arrays.into_iter().map(|(n, rows, cols, base)| {
                placed(&format!("a{n}"), rows, cols, if near { base % 64 * 8 } else { base })
            });
            if let Ok(c) = Catalog::restore(512, arrays.collect(), &[]) {
                let mut owned = vec![0u8; 512];
                for e in c.list("", usize::MAX) {
                    for cell in &mut owned[e.base as usize..(e.base + e.extent) as usize] { *cell += 1; }
                }
                for (&base, &len) in &c.free {
                    for cell in &mut owned[base as usize..(base + len) as usize] { *cell += 1; }
                }
                prop_assert!(owned.iter().all(|&n| n == 1));
            }
        }
    }
}

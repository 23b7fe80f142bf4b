//! The catalog: any names and shapes, made, opened and removed.

use super::Input;
use crate::catalog::{Catalog, CatalogError, Form, Kind, check_name};
use crate::layout::Shape;
use std::collections::BTreeMap;

const CAPACITY: u32 = 1 << 12;

/// A name is taken if it is one, as the protocol says what is one; arrays share
/// no cell; and what was free is free again.
pub fn names(data: &[u8]) {
    let mut input = Input(data);
    let mut catalog = Catalog::new(CAPACITY);
    let mut there: BTreeMap<String, (u32, u32, Form)> = BTreeMap::new();
    while !input.is_empty() {
        let [what, kind, rows, cols] = input.array();
        let param = u64::from_le_bytes(input.array());
        let bytes = input.piece();
        let Ok(name) = std::str::from_utf8(bytes) else {
            continue;
        };
        let fine = |c: char| c.is_ascii_alphanumeric() || "_-./+@".contains(c);
        let is_name = (1..=128).contains(&name.len())
            && name.chars().all(fine)
            && !name.starts_with(['-', '.', '/', '+', '@']);
        assert_eq!(check_name(name).is_ok(), is_name, "{name:?}");
        if what & 3 == 0 {
            let removed = catalog.remove(name, what & 4 != 0);
            assert_eq!(removed.is_ok(), there.remove(name).is_some(), "{name:?}");
            if what & 8 != 0 {
                catalog.release_held();
            }
        } else if let Some(kind) = Kind::from_code(kind % 8) {
            // Large ones too.
            let rows = if rows > 250 { u32::MAX } else { rows.into() };
            let form = Form { kind, shape: Shape { rows, cols: cols.into() }, param };
            match catalog.open_or_create(name, form, || Ok(None)) {
                Ok((entry, true)) => {
                    assert!(is_name && form.shape.cells() > 0);
                    assert_eq!(u64::from(entry.extent), form.shape.extent());
                    let before = there.insert(name.to_owned(), (entry.base, entry.extent, form));
                    assert!(before.is_none(), "{name:?} was made twice");
                }
                Ok((entry, false)) => {
                    assert_eq!(there.get(name), Some(&(entry.base, entry.extent, form)));
                }
                Err(CatalogError::Mismatch { .. }) => assert!(there.contains_key(name)),
                Err(_) => {}
            }
        }
        let mut cells: Vec<(u32, u32)> =
            there.values().map(|&(base, len, _)| (base, len)).collect();
        cells.sort_unstable();
        let mut at = 0;
        for (base, len) in cells {
            assert!(at <= base && base + len <= CAPACITY, "arrays share cells, or have none");
            at = base + len;
        }
    }
    let names: Vec<&String> = there.keys().collect();
    let listed: Vec<String> = catalog.list("", usize::MAX).map(|e| e.name.clone()).collect();
    assert!(listed.iter().eq(names), "{listed:?}");
    for name in listed {
        assert!(catalog.remove(&name, false).is_ok());
    }
    catalog.release_held();
    assert_eq!(catalog.free_cells(), (CAPACITY.into(), CAPACITY.into()), "cells were lost");
}

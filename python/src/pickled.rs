//! Views as tuples of numbers, for pickling.

use crate::view::{Axis, View};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A view in numbers: which kind it is, and what it needs.
pub type Numbers = (u8, Vec<i64>);

/// A function that makes a handle anew, and what to call it with.
pub type Reduced<'py, A> = (Bound<'py, PyAny>, A);

/// What a view needs: origin, array, its rows and columns, the view.
pub type ViewArgs = (String, String, usize, usize, Numbers);

/// What a cell needs: origin, array, its rows and columns, row and column.
pub type CellArgs = (String, String, usize, usize, usize, usize);

fn put(numbers: &mut Vec<i64>, axis: &Axis) {
    numbers.extend([axis.start as i64, axis.step as i64, axis.len as i64]);
}

/// A view as numbers.
pub fn numbers(view: &View) -> Numbers {
    let mut out = Vec::new();
    let kind = match view {
        View::Grid(rows, cols) => {
            put(&mut out, rows);
            put(&mut out, cols);
            0
        }
        View::Row(row, cols) => {
            out.push(*row as i64);
            put(&mut out, cols);
            1
        }
        View::Column(rows, col) => {
            out.push(*col as i64);
            put(&mut out, rows);
            2
        }
        View::Flat(rows, cols, part) => {
            put(&mut out, rows);
            put(&mut out, cols);
            put(&mut out, part);
            3
        }
        View::Picked(cells) => {
            out.extend(cells.iter().flat_map(|&(row, col)| [row as i64, col as i64]));
            4
        }
    };
    (kind, out)
}

/// The view of these numbers in an array of this shape. They come from a
/// pickle, so nothing is believed: every cell must lie in the array.
pub fn view((kind, numbers): &Numbers, rows: usize, cols: usize) -> PyResult<View> {
    let bad = || PyValueError::new_err("this pickle of a view makes no sense");
    let axis = |at: usize, most: usize| -> PyResult<Axis> {
        let [start, step, len] = numbers.get(at..at + 3).ok_or_else(bad)? else {
            return Err(bad());
        };
        let inside = |n: i64| (0..most as i64).contains(&n);
        let last = len.checked_sub(1).and_then(|n| n.checked_mul(*step)?.checked_add(*start));
        let empty = *len == 0;
        // Of step 0 any number of cells would lie inside.
        let stays = *step == 0 && *len > 1;
        if *len < 0 || stays || !(empty || inside(*start) && last.is_some_and(inside)) {
            return Err(bad());
        }
        let start = if empty { 0 } else { *start as usize };
        Ok(Axis { start, step: *step as isize, len: *len as usize })
    };
    let side = |at: usize, most: usize| -> PyResult<usize> {
        let number = numbers.get(at).and_then(|&n| usize::try_from(n).ok());
        number.filter(|&n| n < most).ok_or_else(bad)
    };
    Ok(match kind {
        0 => View::Grid(axis(0, rows)?, axis(3, cols)?),
        1 => View::Row(side(0, rows)?, axis(1, cols)?),
        2 => View::Column(axis(1, rows)?, side(0, cols)?),
        3 => {
            let (rows, cols) = (axis(0, rows)?, axis(3, cols)?);
            View::Flat(rows, cols, axis(6, rows.len.saturating_mul(cols.len))?)
        }
        4 if numbers.len().is_multiple_of(2) && !numbers.is_empty() => View::Picked(
            (0..numbers.len() / 2)
                .map(|i| Ok((side(2 * i, rows)?, side(2 * i + 1, cols)?)))
                .collect::<PyResult<_>>()?,
        ),
        _ => return Err(bad()),
    })
}

//! Many cells are as easy as one, a column as easy as a row.

use crate::set::Set;
use farcell::Error;

alone! { what_is_selected_is_checked }
together! { rows_columns_lists_and_all many_thousands_of_cells counters_in_rows_and_columns }

fn rows_columns_lists_and_all(set: &Set) {
    let server = set.start();
    let (a, b) = set.two(&server);
    let (events, theirs) = (a.events("e", 3, 10).unwrap(), b.events("e", 3, 10).unwrap());
    assert_eq!((events.rows(), events.cols()), (3, 10));
    assert_eq!(events.row(1).unwrap().set_all().unwrap(), 10);
    assert_eq!(theirs.column(4).unwrap().set_all().unwrap(), 2, "one was set");
    assert_eq!(events.column(4).unwrap().snapshot().unwrap(), [true; 3]);
    let cells = [(2, 9), (1, 0), (0, 4), (0, 4)];
    assert_eq!(theirs.cells(&cells).unwrap().snapshot().unwrap(), [false, true, true, true]);
    assert_eq!(events.cells(&cells).unwrap().clear_all().unwrap(), 2);
    let all = theirs.snapshot().unwrap();
    assert_eq!(all, events.snapshot().unwrap());
    let on: Vec<usize> = (0..30).filter(|&i| all[i]).collect();
    assert_eq!(on, [11, 12, 13, 14, 15, 16, 17, 18, 19, 24]);
    assert!(on.iter().all(|&i| events.flat(i).unwrap().is_set().unwrap()));
    assert_eq!(theirs.clear_all().unwrap(), 10);
    assert_eq!(events.all().cell(24), (2, 4));
    assert_eq!(events.all().transitions().unwrap()[24], 2);
    assert_eq!(events.snapshot().unwrap(), [false; 30]);
}

fn what_is_selected_is_checked(set: &Set) {
    let server = set.start();
    let events = set.client(&server, 0).events("e", 3, 10).unwrap();
    assert!(matches!(events.at(3, 0), Err(Error::OutOfRange { row: 3, rows: 3, .. })));
    assert!(matches!(events.flat(30), Err(Error::OutOfRange { .. })));
    assert!(matches!(events.row(3), Err(Error::OutOfRange { row: 3, rows: 3, .. })));
    assert!(matches!(events.column(10), Err(Error::OutOfRange { col: 10, cols: 10, .. })));
    assert!(matches!(events.cells(&[(0, 0), (5, 0)]), Err(Error::OutOfRange { .. })));
    assert!(matches!(events.cells(&[]), Err(Error::BadSelection { .. })));
}

fn many_thousands_of_cells(set: &Set) {
    // More than fit into one frame, and into one READ.
    let rows = set.times(300) as usize;
    let server = set.server().capacity(1 << 19).start().unwrap();
    let (a, b) = set.two(&server);
    let (events, theirs) = (a.events("big", rows, 1000).unwrap(), b.open_events("big").unwrap());
    assert_eq!(events.set_all().unwrap(), rows * 1000);
    assert_eq!(theirs.column(999).unwrap().clear_all().unwrap(), rows);
    for all in [events.snapshot().unwrap(), theirs.snapshot().unwrap()] {
        assert_eq!(all.len(), rows * 1000);
        assert!(all.iter().enumerate().all(|(i, &set)| set == (i % 1000 != 999)));
    }
    let list: Vec<(usize, usize)> = (0..rows * 1000).rev().map(|i| (i / 1000, i % 1000)).collect();
    assert_eq!(events.cells(&list).unwrap().clear_all().unwrap(), rows * 999);
    assert_eq!(theirs.snapshot().unwrap(), vec![false; rows * 1000]);
}

fn counters_in_rows_and_columns(set: &Set) {
    let server = set.start();
    let (a, b) = set.two(&server);
    let (ours, theirs) = (a.counters("c", 3, 3).unwrap(), b.counters("c", 3, 3).unwrap());
    for i in 0..9 {
        ours.flat(i).unwrap().store(i as i64 - 4).unwrap();
    }
    assert_eq!(theirs.column(1).unwrap().snapshot().unwrap(), [-3, 0, 3]);
    assert_eq!(theirs.row(2).unwrap().snapshot().unwrap(), [2, 3, 4]);
    assert_eq!(theirs.all().snapshot().unwrap(), (-4..5).collect::<Vec<_>>());
}

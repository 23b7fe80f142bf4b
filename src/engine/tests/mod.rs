//! The engine without sockets.

mod schedules;

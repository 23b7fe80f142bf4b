//! Without TLS: there is no channel, and nobody can make one.

use crate::auth::Binding;
use std::io;

/// What a server needs to encrypt: nothing has it.
#[derive(Clone, Debug)]
pub enum Acceptor {}

/// A TLS connection: there is none.
#[derive(Debug)]
pub enum Channel {}

impl Acceptor {
    /// As with TLS.
    ///
    /// # Errors
    /// There is none.
    pub fn new() -> Result<Acceptor, String> {
        Err(super::NOT_BUILT.to_owned())
    }

    /// As with TLS.
    ///
    /// # Errors
    /// None.
    pub fn accept(&self) -> io::Result<Channel> {
        match *self {}
    }
}

impl Channel {
    /// As with TLS.
    ///
    /// # Errors
    /// There is none.
    pub fn client() -> Result<Channel, String> {
        Err(super::NOT_BUILT.to_owned())
    }

    /// As with TLS.
    pub fn binding(&self) -> Option<Binding> {
        match *self {}
    }

    /// As with TLS.
    pub fn owes(&self) -> bool {
        match *self {}
    }

    /// As with TLS.
    pub fn holds(&self) -> bool {
        match *self {}
    }

    /// As with TLS.
    ///
    /// # Errors
    /// None.
    pub fn feed(&mut self, _: &[u8]) -> io::Result<()> {
        match *self {}
    }

    /// As with TLS.
    ///
    /// # Errors
    /// None.
    pub fn take(&mut self, _: &mut [u8]) -> io::Result<usize> {
        match *self {}
    }

    /// As with TLS.
    pub fn is_over(&self) -> bool {
        match *self {}
    }

    /// As with TLS.
    ///
    /// # Errors
    /// None.
    pub fn write(
        &mut self,
        _: &[u8],
        _: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        match *self {}
    }
}

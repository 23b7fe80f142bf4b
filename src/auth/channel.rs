//! What the handshake runs in: the bare connection, or TLS.

use super::Secret;

/// Whether what is said is encrypted. The same three for servers and clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Tls {
    /// Not at all. What a server does unless told otherwise.
    Off = 0,
    /// If the other side can and wants to. What a client does unless told
    /// otherwise. Nobody in between can keep the two from it: what the server
    /// offered is under the proof.
    #[default]
    Auto = 1,
    /// Or there is no connection.
    Require = 2,
}

impl std::str::FromStr for Tls {
    type Err = String;
    fn from_str(s: &str) -> Result<Tls, String> {
        match s {
            "off" => Ok(Tls::Off),
            "auto" => Ok(Tls::Auto),
            "require" => Ok(Tls::Require),
            other => Err(format!("{other:?} says nothing about TLS; use off, auto or require")),
        }
    }
}

/// What only the two ends of one TLS connection know: its exporter value of the
/// label `EXPORTER-Channel-Binding`, without context (RFC 9266, RFC 8446 7.5).
#[derive(Clone, Copy, Debug)]
pub struct Binding(Secret<BINDING_LEN>);

impl Binding {
    /// Takes the exporter value.
    #[must_use]
    pub const fn new(exported: [u8; BINDING_LEN]) -> Binding {
        Binding(Secret::new(exported))
    }

    /// Whether the two are of one connection.
    #[must_use]
    pub fn is(&self, other: &Binding) -> bool {
        self.0.is(&other.0)
    }
}

/// Bytes of a [`Binding`].
pub const BINDING_LEN: usize = 32;

/// What a binding adds to what is proved.
pub(super) fn bound(binding: Option<&Binding>) -> &[u8] {
    binding.map_or(&[], |binding| binding.0.expose())
}

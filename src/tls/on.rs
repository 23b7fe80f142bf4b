//! With TLS.

use crate::auth::{BINDING_LEN, Binding};
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::NoServerSessionStorage;
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, Connection, DigitallySignedStruct, ServerConfig,
    ServerConnection, SignatureScheme,
};
use std::io::{self, Read, Write};
use std::sync::{Arc, LazyLock};

/// RFC 9266.
const BINDING_LABEL: &[u8] = b"EXPORTER-Channel-Binding";
/// The name in the certificate, which nobody looks at.
const NAME: &str = "farcell.invalid";

static PROVIDER: LazyLock<Arc<CryptoProvider>> =
    LazyLock::new(|| Arc::new(ring::default_provider()));

/// What a server needs to encrypt: a certificate of its own making.
#[derive(Clone, Debug)]
pub struct Acceptor(Arc<ServerConfig>);

impl Acceptor {
    /// Makes a key and a certificate for it, both in memory alone.
    ///
    /// # Errors
    /// Why that cannot be, in words.
    pub fn new() -> Result<Acceptor, String> {
        let made = rcgen::generate_simple_self_signed([NAME.to_owned()])
            .map_err(|e| format!("making a certificate: {e}"))?;
        let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
        let mut config = ServerConfig::builder_with_provider(PROVIDER.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| e.to_string())?
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key.into())
            .map_err(|e| e.to_string())?;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Acceptor(Arc::new(config)))
    }

    /// The server's end of a connection.
    ///
    /// # Errors
    /// None that is known of.
    pub fn accept(&self) -> io::Result<Channel> {
        let server = ServerConnection::new(self.0.clone()).map_err(io::Error::other)?;
        Ok(Channel::new(server.into()))
    }
}

/// Takes any certificate, as the [module](super) says why, from one who has its
/// key.
#[derive(Debug)]
struct AnyCertificate;

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::PeerIncompatible::ServerDoesNotSupportTls12Or13.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &PROVIDER.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        PROVIDER.signature_verification_algorithms.supported_schemes()
    }
}

static CLIENT: LazyLock<Result<Arc<ClientConfig>, String>> = LazyLock::new(|| {
    let mut config = ClientConfig::builder_with_provider(PROVIDER.clone())
        .with_protocol_versions(&[&TLS13])
        .map_err(|e| e.to_string())?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate))
        .with_no_client_auth();
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    Ok(Arc::new(config))
});

/// One end of a TLS connection.
#[derive(Debug)]
pub struct Channel {
    tls: Connection,
    /// What has come and could not be taken in yet, from `at` on.
    rest: Vec<u8>,
    at: usize,
    /// The other end has said that nothing more will come.
    over: bool,
    /// There may be something to take.
    filled: bool,
}

impl Channel {
    fn new(tls: Connection) -> Channel {
        Channel { tls, rest: Vec::new(), at: 0, over: false, filled: false }
    }

    /// The client's end of a connection.
    ///
    /// # Errors
    /// Why there is none, in words.
    pub fn client() -> Result<Channel, String> {
        let config = CLIENT.as_ref().map_err(Clone::clone)?.clone();
        let name = ServerName::try_from(NAME).map_err(|e| e.to_string())?;
        let client = ClientConnection::new(config, name).map_err(|e| e.to_string())?;
        Ok(Channel::new(client.into()))
    }

    /// What only the two ends of this connection know. `None` until its handshake is
    /// over.
    pub fn binding(&self) -> Option<Binding> {
        if self.tls.is_handshaking() {
            return None;
        }
        let exported = self.tls.export_keying_material([0; BINDING_LEN], BINDING_LABEL, Some(&[]));
        exported.ok().map(Binding::new)
    }

    /// Whether there are bytes to be sent.
    pub fn owes(&self) -> bool {
        self.tls.wants_write()
    }

    /// Whether something can be taken, or perhaps so.
    pub fn holds(&self) -> bool {
        self.filled || self.at < self.rest.len()
    }

    /// Whether the other end has said that nothing more will come.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Takes in bytes that have come by the socket.
    ///
    /// # Errors
    /// `InvalidData`: they are not what the other end has sent, or it speaks no
    /// TLS.
    pub fn feed(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.holds() {
            self.rest.extend_from_slice(bytes);
            return Ok(());
        }
        let n = self.digest(bytes)?;
        if n < bytes.len() {
            self.rest.extend_from_slice(&bytes[n..]);
        }
        Ok(())
    }

    /// Decrypts as much as can be kept, and says how many bytes that were.
    fn digest(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut n = 0;
        while n < bytes.len() && !self.filled {
            let read = self.tls.read_tls(&mut &bytes[n..])?;
            n += read;
            let state = self
                .tls
                .process_new_packets()
                .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
            self.filled = state.plaintext_bytes_to_read() > 0;
            self.over |= state.peer_has_closed();
            if read == 0 {
                break;
            }
        }
        Ok(n)
    }

    /// Takes what was decrypted. 0 bytes: more must come first.
    ///
    /// # Errors
    /// As [`feed`](Self::feed).
    pub fn take(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut n = 0;
        while n < into.len() {
            if self.filled {
                match self.tls.reader().read(&mut into[n..]) {
                    Ok(0) => self.filled = false,
                    Ok(m) => n += m,
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.filled = false,
                    Err(e) => return Err(e),
                }
            } else if self.at < self.rest.len() {
                let rest = std::mem::take(&mut self.rest);
                let used = self.digest(&rest[self.at..]);
                self.rest = rest;
                self.at += used?;
                if self.at == self.rest.len() {
                    // An idle connection owns no buffer.
                    self.rest = Vec::new();
                    self.at = 0;
                }
            } else {
                break;
            }
        }
        Ok(n)
    }

    /// Encrypts and sends as far as the socket takes it; how many of the bytes that
    /// were. What was encrypted and not sent is [owed](Self::owes), and goes first
    /// the next time, for which no bytes are needed.
    ///
    /// # Errors
    /// Those of the socket but `WouldBlock`, which is no error here.
    pub fn write(
        &mut self,
        bytes: &[u8],
        mut send: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let mut sent = 0;
        loop {
            while self.tls.wants_write() {
                match self.tls.write_tls(&mut Sender(&mut send)) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(_) => {}
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(sent),
                    Err(e) => return Err(e),
                }
            }
            if sent == bytes.len() {
                return Ok(sent);
            }
            let n = self.tls.writer().write(&bytes[sent..])?;
            if n == 0 {
                // The handshake is not over: nobody writes before.
                return Err(io::ErrorKind::NotConnected.into());
            }
            sent += n;
        }
    }
}

/// A socket, as what is encrypted is written to one.
struct Sender<'s, S>(&'s mut S);

impl<S: FnMut(&[u8]) -> io::Result<usize>> Write for Sender<'_, S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (self.0)(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

//! Which server, and how to reach it: the arguments that clients share.

use crate::args::seconds;
use crate::failure::Failure;
use farcell::{Client, ClientBuilder, DEFAULT_PORT, Tls, TransportChoice};
use std::path::PathBuf;
use std::time::Duration;

/// The connection's arguments.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Connection")]
pub struct Connection {
    /// The server [env: FARCELL_ADDR, default: localhost:7117]
    #[arg(long, global = true, value_name = "HOST:PORT")]
    pub addr: Option<String>,
    /// The file that holds the key [env: FARCELL_AUTHKEY_FILE, default:
    /// ~/.config/farcell/authkey]
    #[arg(long, global = true, value_name = "PATH")]
    pub authkey_file: Option<PathBuf>,
    /// How long one attempt to connect may take [default: 5]
    #[arg(long, global = true, value_name = "SECONDS", value_parser = seconds)]
    connect_timeout: Option<Duration>,
    /// How long to go on trying when no server is there yet [default: 0]
    #[arg(long, global = true, value_name = "SECONDS", value_parser = seconds)]
    wait_server: Option<Duration>,
    /// How long to wait for a lost connection to come back [default: 30]
    #[arg(long, global = true, value_name = "SECONDS", value_parser = seconds)]
    pub reconnect: Option<Duration>,
    /// By which way: auto, shm, rdma or tcp; shm and rdma fail where they cannot
    /// be had. -v shows the choice and its reasons [env: FARCELL_TRANSPORT,
    /// default: auto]
    #[arg(long, global = true, value_name = "WAY")]
    transport: Option<TransportChoice>,
    /// The RDMA device [env: FARCELL_DEVICE, default: the first that works]
    #[arg(long, global = true, value_name = "NAME[:PORT]")]
    device: Option<String>,
    /// Encrypt what goes over TCP: off, auto (if the other side does) or require
    /// (refuse who does not, and RDMA, which cannot be encrypted) [env:
    /// FARCELL_TLS, default: auto; of `serve`: off]
    #[arg(long, global = true, value_name = "off|auto|require")]
    tls: Option<Tls>,
    /// Place of the GID in the port's table [env: FARCELL_GID_INDEX, default:
    /// all are tried]
    #[arg(long, global = true, value_name = "N")]
    gid_index: Option<u32>,
}

impl Connection {
    /// The server's address: what was given, or what the environment says.
    pub fn addr(&self) -> Result<String, Failure> {
        if let Some(addr) = &self.addr {
            return Ok(addr.clone());
        }
        match std::env::var("FARCELL_ADDR") {
            Ok(addr) if !addr.is_empty() => Ok(addr),
            Err(std::env::VarError::NotUnicode(addr)) => Err(Failure::Usage(format!(
                "FARCELL_ADDR={addr:?} is no address; give HOST:PORT, for example node0:7117"
            ))),
            _ => Ok(format!("localhost:{DEFAULT_PORT}")),
        }
    }

    /// The one transport that was asked for, by argument or environment.
    pub fn transport(&self) -> Result<Option<TransportChoice>, Failure> {
        let choice = match (self.transport, std::env::var("FARCELL_TRANSPORT")) {
            (Some(choice), _) => choice,
            (None, Ok(text)) if !text.is_empty() => {
                text.parse().map_err(|why| Failure::Usage(format!("FARCELL_TRANSPORT: {why}")))?
            }
            _ => TransportChoice::Auto,
        };
        Ok(Some(choice).filter(|choice| *choice != TransportChoice::Auto))
    }

    /// How long an attempt to connect may take, if that was given.
    pub fn connect_timeout(&self) -> Option<Duration> {
        self.connect_timeout
    }

    /// The RDMA device that was asked for, by argument or environment.
    pub fn device(&self) -> Option<String> {
        let set = || std::env::var("FARCELL_DEVICE").ok().filter(|name| !name.is_empty());
        self.device.clone().or_else(set)
    }

    /// What was said about encryption, by argument or environment.
    pub fn tls(&self) -> Result<Option<Tls>, Failure> {
        match (self.tls, std::env::var("FARCELL_TLS")) {
            (None, Ok(text)) if !text.is_empty() => {
                let tls =
                    text.parse().map_err(|why| Failure::Usage(format!("FARCELL_TLS: {why}")))?;
                Ok(Some(tls))
            }
            (tls, _) => Ok(tls),
        }
    }

    /// Settings of a client of that server.
    pub fn builder(&self) -> Result<ClientBuilder, Failure> {
        let mut builder = Client::builder().addr(self.addr()?);
        if let Some(path) = &self.authkey_file {
            builder = builder.key_file(path);
        }
        if let Some(time) = self.connect_timeout {
            builder = builder.connect_timeout(time);
        }
        if let Some(time) = self.wait_server {
            builder = builder.wait_for_server(time);
        }
        if let Some(time) = self.reconnect {
            builder = builder.reconnect_for(time);
        }
        if let Some(choice) = self.transport {
            builder = builder.transport(choice);
        }
        if let Some(tls) = self.tls {
            builder = builder.tls(tls);
        }
        if let Some(device) = &self.device {
            builder = builder.device(device);
        }
        if let Some(index) = self.gid_index {
            builder = builder.gid_index(index);
        }
        Ok(builder)
    }

    /// Connects.
    pub fn connect(&self) -> Result<Client, Failure> {
        Ok(self.builder()?.connect()?)
    }
}

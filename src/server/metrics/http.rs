//! As much of HTTP/1.1 (RFC 9112) as a scraper needs. Pure.

/// Most bytes of a request's head.
pub const MOST_HEAD: usize = 8 << 10;

/// Most header fields of a request.
const MOST_FIELDS: usize = 64;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// The metrics; `body` is false for HEAD.
    Metrics {
        /// Whether the body is wanted.
        body: bool,
    },
    /// Whether the server lives.
    Health {
        /// Whether the body is wanted.
        body: bool,
    },
    /// Something that is answered by this status and nothing else.
    Refused(Status),
}

/// A status that is no success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It is no request.
    Bad,
    /// There is nothing of that name.
    Missing,
    /// GET and HEAD are all there is.
    Method,
    /// It took too long.
    Slow,
    /// The head is too long.
    TooLong,
}

impl Status {
    /// Code and reason.
    pub const fn line(self) -> &'static str {
        match self {
            Status::Bad => "400 Bad Request",
            Status::Missing => "404 Not Found",
            Status::Method => "405 Method Not Allowed",
            Status::Slow => "408 Request Timeout",
            Status::TooLong => "431 Request Header Fields Too Large",
        }
    }
}

/// What the bytes of a request ask for, or `None` while its head is not whole.
pub fn parse(bytes: &[u8]) -> Option<Asked> {
    let mut fields = [httparse::EMPTY_HEADER; MOST_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(&bytes[..bytes.len().min(MOST_HEAD)]) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) if bytes.len() < MOST_HEAD => return None,
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            return Some(Asked::Refused(Status::TooLong));
        }
        Err(_) => return Some(Asked::Refused(Status::Bad)),
    }
    let body = match request.method {
        Some("GET") => true,
        Some("HEAD") => false,
        _ => return Some(Asked::Refused(Status::Method)),
    };
    // A query changes nothing.
    let path = request.path.and_then(|path| path.split('?').next());
    Some(match path {
        Some("/metrics") => Asked::Metrics { body },
        Some("/healthz") => Asked::Health { body },
        _ => Asked::Refused(Status::Missing),
    })
}

/// A whole answer. The connection ends behind it.
pub fn answer(line: &str, kind: &str, text: &[u8], body: bool) -> Vec<u8> {
    let allow = if line.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
    let mut bytes = format!(
        "HTTP/1.1 {line}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n{allow}Cache-Control: no-store\r\nConnection: close\r\n\r\n",
        text.len()
    )
    .into_bytes();
    if body {
        bytes.extend_from_slice(text);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn requests_are_understood_and_others_refused() {
        let cases: [(&[u8], Option<Asked>); 11] = [
            (b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", Some(Asked::Metrics { body: true })),
            (b"GET /metrics?x=1 HTTP/1.0\r\n\r\n", Some(Asked::Metrics { body: true })),
            (b"HEAD /metrics HTTP/1.1\r\n\r\n", Some(Asked::Metrics { body: false })),
            (b"GET /healthz HTTP/1.1\r\n\r\n", Some(Asked::Health { body: true })),
            (b"GET / HTTP/1.1\r\n\r\n", Some(Asked::Refused(Status::Missing))),
            (b"POST /metrics HTTP/1.1\r\n\r\n", Some(Asked::Refused(Status::Method))),
            (b"GET /metrics HTTP/1.1\r\nHost", None),
            (b"", None),
            (b"\x16\x03\x01\x02\x00", Some(Asked::Refused(Status::Bad))),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Some(Asked::Refused(Status::Bad))),
            (b"FARCELL\x00\x01", Some(Asked::Refused(Status::Bad))),
        ];
        for (bytes, asked) in cases {
            assert_eq!(parse(bytes), asked, "{}", String::from_utf8_lossy(bytes));
        }
        let mut long = b"GET /metrics HTTP/1.1\r\nA: ".to_vec();
        long.resize(MOST_HEAD, b'a');
        assert_eq!(parse(&long), Some(Asked::Refused(Status::TooLong)));
        let many = "A: b\r\n".repeat(MOST_FIELDS + 1);
        let many = format!("GET /metrics HTTP/1.1\r\n{many}\r\n");
        assert_eq!(parse(many.as_bytes()), Some(Asked::Refused(Status::TooLong)));
    }

    proptest! {
        #[test]
        fn any_bytes_are_waited_for_or_answered(bytes in prop::collection::vec(any::<u8>(), 0..9000)) {
            prop_assert!(parse(&bytes).is_some() || bytes.len() < MOST_HEAD);
        }
    }
}

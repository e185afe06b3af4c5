//! An incremental reader of `multipart/form-data` (RFC 2046, 5.1; RFC 7578). Pure: bytes in, events out. It buffers the
//! head of a part and the bytes of an incomplete delimiter, nothing else.
//!
//! ```text
//! Skip ─ delimiter line ─► Head ─ empty line ─► Data ─ delimiter line ─► Head …
//!   └─ closing delimiter ─► Epilogue ◄─ closing delimiter ─┘
//! ```
//! A delimiter is CRLF, two hyphens and the boundary; the body is parsed as if a CRLF preceded it. A delimiter contains
//! only one carriage return, so no other delimiter can begin within a match that fails.

use super::media_type::MediaType;

/// Longest head of a part in bytes.
const MAX_HEAD: usize = 8 << 10;
/// Most headers of a part.
const MAX_HEADERS: usize = 16;
/// Longest boundary (RFC 2046, 5.1.1).
const MAX_BOUNDARY: usize = 70;
/// Longest padding after the boundary in a delimiter's line, in bytes. Clients send none.
const MAX_LINE: usize = 64;

/// The body is not a form, or exceeds a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MultipartError {
    #[error("a multipart body needs a boundary of 1 to 70 characters")]
    Boundary,
    #[error("the head of a part is above 8 KiB or has more than 16 headers")]
    LargeHead,
    #[error("the head of a part cannot be read")]
    Head,
    #[error("the multipart body ends before its closing boundary")]
    Truncated,
}

/// An event of the reader.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event<'a> {
    /// The beginning of a part.
    Part(PartHead),
    /// Bytes of the current part.
    Data(&'a [u8]),
    /// The end of the current part.
    PartEnd,
    /// More input is needed.
    More,
}

/// The head of a part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PartHead {
    /// The name of the form's field.
    pub(crate) name: Option<String>,
    /// As sent; it may be a path.
    pub(crate) filename: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the first delimiter.
    Skip,
    Head,
    Data,
    /// After the closing delimiter.
    Epilogue,
}

/// The reader.
pub(crate) struct Multipart {
    delimiter: Vec<u8>,
    /// Number of bytes of a delimiter that have been matched.
    matched: usize,
    /// Bytes after a complete delimiter, up to the end of its line.
    line: Vec<u8>,
    /// Bytes that looked like a delimiter's line but are data.
    spilled: Vec<u8>,
    head: Vec<u8>,
    state: State,
}

/// The result of a search for a delimiter.
enum Found<'a> {
    Data(&'a [u8]),
    /// A partial match turned out to be data: that many bytes from the beginning of a delimiter.
    Prefix(usize),
    /// Bytes that looked like a delimiter turned out to be data; they are in `spilled`.
    Spilled,
    Delimiter,
    LastDelimiter,
    More,
}

impl Multipart {
    /// Creates a reader for the boundary of a `Content-Type` header.
    pub(crate) fn new(boundary: &str) -> Result<Self, MultipartError> {
        if boundary.is_empty() || boundary.len() > MAX_BOUNDARY || boundary.contains(['\r', '\n']) {
            return Err(MultipartError::Boundary);
        }
        Ok(Self {
            delimiter: format!("\r\n--{boundary}").into_bytes(),
            matched: 2,
            line: Vec::new(),
            spilled: Vec::new(),
            head: Vec::new(),
            state: State::Skip,
        })
    }

    /// Reads the next event from the front of `input`.
    pub(crate) fn step<'a, 'i: 'a>(
        &'a mut self,
        input: &mut &'i [u8],
    ) -> Result<Event<'a>, MultipartError> {
        loop {
            match self.state {
                State::Epilogue => {
                    *input = &[];
                    return Ok(Event::More);
                }
                State::Head => {
                    let Some(head) = self.read_head(input)? else {
                        return Ok(Event::More);
                    };
                    self.state = State::Data;
                    return Ok(Event::Part(head));
                }
                State::Skip | State::Data => {}
            }
            let in_part = self.state == State::Data;
            let found = self.search(input);
            match found {
                Found::More => return Ok(Event::More),
                Found::Delimiter => self.state = State::Head,
                Found::LastDelimiter => self.state = State::Epilogue,
                // Everything before the first part is skipped.
                _ if !in_part => continue,
                Found::Data(data) => return Ok(Event::Data(data)),
                Found::Prefix(len) => {
                    return Ok(Event::Data(self.delimiter.get(..len).unwrap_or_default()));
                }
                Found::Spilled => return Ok(Event::Data(&self.spilled)),
            }
            if in_part {
                return Ok(Event::PartEnd);
            }
        }
    }

    /// Checks that the form is complete.
    ///
    /// # Errors
    /// Returns [`MultipartError::Truncated`] if the closing delimiter is missing.
    pub(crate) fn finish(&self) -> Result<(), MultipartError> {
        match self.state {
            State::Epilogue => Ok(()),
            _ => Err(MultipartError::Truncated),
        }
    }

    fn search<'a>(&mut self, input: &mut &'a [u8]) -> Found<'a> {
        while let Some(wanted) = self.delimiter.get(self.matched) {
            let Some((byte, rest)) = input.split_first() else {
                return Found::More;
            };
            if byte == wanted {
                self.matched += 1;
                *input = rest;
            } else if self.matched > 0 {
                return Found::Prefix(std::mem::take(&mut self.matched));
            } else {
                let (data, rest) = input.split_at(self.next_delimiter(input));
                *input = rest;
                return Found::Data(data);
            }
        }
        self.read_line(input)
    }

    /// Number of bytes of `input` before a delimiter, or before the beginning of one at the end of `input`. Data is
    /// written in pieces as long as these: binary data has a carriage return every 256 bytes.
    fn next_delimiter(&self, input: &[u8]) -> usize {
        let returns = input.iter().enumerate().filter(|(_, byte)| **byte == b'\r');
        let begins = |rest: &[u8]| {
            let mut pairs = rest.iter().zip(&self.delimiter);
            pairs.all(|(byte, wanted)| byte == wanted)
        };
        let mut places = returns.map(|(at, _)| at);
        places
            .find(|at| begins(input.get(*at..).unwrap_or_default()))
            .unwrap_or(input.len())
    }

    /// Reads the rest of a delimiter's line. Unless it is two hyphens, or optional blanks and CRLF, the delimiter
    /// counts as data: the boundary was only the beginning of a longer word.
    fn read_line(&mut self, input: &mut &[u8]) -> Found<'static> {
        while let Some((byte, rest)) = input.split_first() {
            let fits = match (self.line.as_slice(), byte) {
                ([], b'-' | b' ' | b'\t' | b'\r') | ([b'-'], b'-') => true,
                ([.., b'\r'], b'\n') => true,
                ([.., b' ' | b'\t'], b' ' | b'\t' | b'\r') => self.line.len() < MAX_LINE,
                _ => false,
            };
            if !fits {
                self.spilled.clone_from(&self.delimiter);
                self.spilled.append(&mut self.line);
                self.matched = 0;
                return Found::Spilled;
            }
            self.line.push(*byte);
            *input = rest;
            let found = match self.line.as_slice() {
                b"--" => Found::LastDelimiter,
                [.., b'\r', b'\n'] => Found::Delimiter,
                _ => continue,
            };
            self.line.clear();
            self.matched = 0;
            return found;
        }
        Found::More
    }

    fn read_head(&mut self, input: &mut &[u8]) -> Result<Option<PartHead>, MultipartError> {
        while let Some((byte, rest)) = input.split_first() {
            if self.head.len() == MAX_HEAD {
                return Err(MultipartError::LargeHead);
            }
            self.head.push(*byte);
            *input = rest;
            if self.head.ends_with(b"\r\n\r\n") || self.head == b"\r\n" {
                return parse_head(&std::mem::take(&mut self.head)).map(Some);
            }
        }
        Ok(None)
    }
}

fn parse_head(bytes: &[u8]) -> Result<PartHead, MultipartError> {
    let mut space = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let headers = match httparse::parse_headers(bytes, &mut space) {
        Ok(httparse::Status::Complete((_, headers))) => headers,
        Err(httparse::Error::TooManyHeaders) => return Err(MultipartError::LargeHead),
        Ok(httparse::Status::Partial) | Err(_) => return Err(MultipartError::Head),
    };
    let mut named = headers.iter();
    let Some(header) = named.find(|h| h.name.eq_ignore_ascii_case("content-disposition")) else {
        return Ok(PartHead::default());
    };
    let value = std::str::from_utf8(header.value).map_err(|_| MultipartError::Head)?;
    let disposition = MediaType::parse(value);
    // A part with another disposition has no field name (RFC 7578, 4.2).
    let is_field = disposition.value == "form-data";
    Ok(PartHead {
        name: disposition.parameter("name").filter(|_| is_field),
        filename: disposition.parameter("filename"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Part = (Option<String>, Vec<u8>);

    /// Reads a body in pieces of the given lengths, then the rest in one piece.
    fn read(boundary: &str, body: &[u8], pieces: &[usize]) -> Result<Vec<Part>, MultipartError> {
        let mut reader = Multipart::new(boundary)?;
        let mut parts: Vec<Part> = Vec::new();
        let mut open = false;
        let mut rest = body;
        let all = pieces.iter().copied().chain([usize::MAX]);
        for len in all {
            let (mut piece, after) = rest.split_at(len.min(rest.len()));
            rest = after;
            loop {
                match reader.step(&mut piece)? {
                    Event::More => break,
                    Event::Part(head) => {
                        assert!(!open);
                        open = true;
                        parts.push((head.filename, Vec::new()));
                    }
                    Event::Data(data) => {
                        assert!(open && !data.is_empty());
                        parts.last_mut().unwrap().1.extend_from_slice(data);
                    }
                    Event::PartEnd => open = !std::mem::replace(&mut open, false),
                }
            }
            assert!(piece.is_empty());
        }
        reader.finish()?;
        assert!(!open);
        Ok(parts)
    }

    fn body(boundary: &str, parts: &[(String, Vec<u8>)]) -> Vec<u8> {
        let mut body = b"a preamble --x\r\n".to_vec();
        for (name, data) in parts {
            let head = format!(
                "--{boundary}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\
                 Content-Type: application/octet-stream\r\n\r\n"
            );
            body.extend_from_slice(head.as_bytes());
            body.extend_from_slice(data);
            body.extend_from_slice(b"\r\n");
        }
        body.extend_from_slice(format!("--{boundary}--\r\nan epilogue").as_bytes());
        body
    }

    #[test]
    fn bytes_like_a_delimiter_are_data() {
        let data = b"\r\n--b0\r\r\n--b-x\r\n--b x\r\n--b\r\r\n-\r\n\r\r\n--".to_vec();
        let parts = [
            ("/a".to_owned(), data.clone()),
            ("/b".to_owned(), Vec::new()),
        ];
        let read = read("b", &body("b", &parts), &[]).unwrap();
        let wanted = [(Some("/a".into()), data), (Some("/b".into()), Vec::new())];
        assert_eq!(read, wanted);
    }

    #[test]
    fn carriage_returns_do_not_cut_data_into_pieces() {
        let body = b"--b\r\n\r\n1\r2\r\n3\r\n--x4\r\n--b--";
        let mut reader = Multipart::new("b").unwrap();
        let mut rest = body.as_slice();
        let mut pieces = Vec::new();
        loop {
            match reader.step(&mut rest).unwrap() {
                Event::More => break,
                Event::Data(data) => pieces.push(data.to_vec()),
                Event::Part(_) | Event::PartEnd => {}
            }
        }
        assert_eq!(pieces, [b"1\r2\r\n3\r\n--x4"]);
    }

    #[test]
    fn bodies_that_are_none_are_refused() {
        let head = "--b\r\nContent-Disposition: form-data; name=\"file\"\r\n";
        let many = "x: y\r\n".repeat(17);
        for (body, error) in [
            (String::new(), MultipartError::Truncated),
            ("--b\r\n".into(), MultipartError::Truncated),
            (format!("{head}\r\ndata\r\n--b"), MultipartError::Truncated),
            (format!("{head}\r\ndata\r\n--b-"), MultipartError::Truncated),
            (
                format!("--b\r\n{}", "x".repeat(9000)),
                MultipartError::LargeHead,
            ),
            (format!("--b\r\n{many}\r\n"), MultipartError::LargeHead),
            ("--b\r\nno header\r\n\r\n".into(), MultipartError::Head),
        ] {
            assert_eq!(read("b", body.as_bytes(), &[]), Err(error), "{body:.40}");
        }
        assert_eq!(read("b", b"--b--", &[]), Ok(Vec::new()));
        assert_eq!(read("", b"", &[]), Err(MultipartError::Boundary));
        assert_eq!(read("a\r\nb", b"", &[]), Err(MultipartError::Boundary));
        assert_eq!(
            read(&"x".repeat(71), b"", &[]),
            Err(MultipartError::Boundary)
        );
    }

    /// Data made of the characters of delimiters.
    fn data() -> impl Strategy<Value = Vec<u8>> {
        let pieces =
            prop::sample::select(vec!["\r", "\n", "\r\n", "-", "--", "b", "\r\n--", " ", "x"]);
        prop::collection::vec(pieces, 0..20).prop_map(|pieces| pieces.concat().into_bytes())
    }

    proptest! {
        #[test]
        fn parts_survive_in_pieces_of_any_length(
            parts in prop::collection::vec(("[a-z/]{1,8}", data()), 0..4),
            pieces in prop::collection::vec(1_usize..9, 0..80),
        ) {
            // Longer than any run in the data.
            let boundary = "bb\u{2d}x-end";
            let wanted: Vec<Part> = parts.iter().map(|(n, d)| (Some(n.clone()), d.clone())).collect();
            prop_assert_eq!(read(boundary, &body(boundary, &parts), &pieces).unwrap(), wanted);
        }

        #[test]
        fn hostile_bodies_never_panic_and_do_not_depend_on_the_pieces(
            tail in data(), pieces in prop::collection::vec(1_usize..5, 0..40),
        ) {
            let mut body = b"--b\r\n\r\n".to_vec();
            body.extend(tail);
            prop_assert_eq!(read("b", &body, &pieces), read("b", &body, &[]));
        }
    }
}

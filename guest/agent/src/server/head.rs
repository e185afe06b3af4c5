//! Headers that the agent reads.

use std::time::Duration;

use envd::{BadRequest, Blob};
use transport::Fields;

use super::files::head::FileHead;

/// The path of files.
pub(crate) const FILES: &str = "/files";

/// A request's head.
pub(crate) type Head = transport::Head<AgentFields>;

/// Headers that the agent reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AgentFields {
    pub(crate) content_type: String,
    /// `Content-Encoding` or `Connect-Content-Encoding`; empty for `identity`.
    pub(crate) encoding: String,
    pub(crate) access_token: String,
    /// The user of `Authorization: Basic`; `None` if absent or malformed.
    pub(crate) user: Option<String>,
    /// `Connect-Timeout-Ms`; `None` if absent or zero.
    pub(crate) timeout: Option<Duration>,
    /// `Keepalive-Ping-Interval`, which is in seconds; `None` if absent, malformed or zero.
    pub(crate) keepalive: Option<Duration>,
    /// Headers that matter only for [`FILES`]; `None` for other paths.
    pub(crate) file: Option<Box<FileHead>>,
}

impl Fields for AgentFields {
    fn new(path: &str) -> Self {
        Self {
            file: (path == FILES).then(Box::default),
            ..Self::default()
        }
    }

    fn take(&mut self, name: &str, value: &str) -> Result<(), BadRequest> {
        let is = |other: &str| name.eq_ignore_ascii_case(other);
        if is("content-type") {
            value.clone_into(&mut self.content_type);
        } else if is("content-encoding") || is("connect-content-encoding") {
            if !value.eq_ignore_ascii_case("identity") {
                value.clone_into(&mut self.encoding);
            }
        } else if is("x-access-token") {
            value.clone_into(&mut self.access_token);
        } else if is("authorization") {
            self.user = basic_user(value);
        } else if is("connect-timeout-ms") {
            let ms = value
                .parse()
                .map_err(|_| BadRequest::new("bad connect-timeout-ms"))?;
            self.timeout = Some(Duration::from_millis(ms)).filter(|t| !t.is_zero());
        } else if is("keepalive-ping-interval") {
            let seconds = value.parse::<u32>().unwrap_or(0);
            self.keepalive = Some(Duration::from_secs(seconds.into())).filter(|t| !t.is_zero());
        } else if let Some(file) = &mut self.file {
            file.take(name, value);
        }
        Ok(())
    }
}

/// The user name of `Basic base64("user:password")`; the password is ignored.
fn basic_user(value: &str) -> Option<String> {
    let (scheme, credentials) = value.split_once(' ')?;
    let credentials = Blob::decode(credentials.trim().as_bytes())?;
    let credentials = String::from_utf8(credentials).ok()?;
    let user = credentials.split(':').next().unwrap_or_default();
    (scheme.eq_ignore_ascii_case("basic") && !user.is_empty()).then(|| user.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_the_agent_are_read() {
        let text = "POST /p?x=1 HTTP/1.1\r\nAuthorization: Basic dXNlcjo=\r\nConnect-Timeout-Ms: 0\r\n\
                    Keepalive-Ping-Interval: 50\r\nX-Access-Token:  t \r\n\r\n";
        let (head, _, _) = transport::http::parse(text.as_bytes()).unwrap().unwrap();
        let fields: AgentFields = head.fields;
        assert_eq!(
            (fields.user.as_deref(), fields.access_token.as_str()),
            (Some("user"), "t")
        );
        assert_eq!(
            (fields.timeout, fields.keepalive),
            (None, Some(Duration::from_secs(50)))
        );
        assert_eq!(fields.file, None);
        assert!(AgentFields::new(FILES).file.is_some());
    }
}

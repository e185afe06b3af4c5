//! Files of a sandbox.

use envd::{AnswerLimits, Blob, ClientError, FileType, ListDirRequest, ListDirResponse, one_line};
use rmcp::model::{CallToolResult, ContentBlock};

use super::{Answer, Call, text};
use crate::failure::Failure;

/// Maximum length of an image in bytes.
pub(super) const MAX_IMAGE: usize = 3 << 20;
/// Maximum number of listed entries.
const MAX_ENTRIES: usize = 1000;
/// How files of these types begin.
const IMAGES: [(&[u8], &str); 2] = [
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
];

pub(super) fn read(call: &Call<'_>) -> Answer {
    let (path, most) = (call.needed("path"), call.sandboxes.limits.max_output);
    let limits = AnswerLimits {
        body: MAX_IMAGE,
        ..AnswerLimits::DATA
    };
    let read = call.in_agent(|client| {
        client.set_limits(limits);
        match client.read_file(path, None) {
            // It exceeds the limit.
            Err(ClientError::Protocol(_)) => Ok(None),
            read => read.map(Some),
        }
    })?;
    if let Some(image) = read.as_deref().and_then(image) {
        return Ok(CallToolResult::success(vec![image]));
    }
    let short = read.filter(|bytes| bytes.len() <= most as usize);
    match short.map(String::from_utf8) {
        Some(Ok(content)) => text(content),
        Some(Err(_)) => Err(Failure::refused(format!("{path} is not text"))
            .with_cure("use `exec`, for example with `file` or `base64`")),
        None => Err(
            Failure::refused(format!("{path} has more than {most} bytes"))
                .with_cure("read a part of it with `exec`, for example with `sed -n 1,100p`"),
        ),
    }
}

/// The image that a file contains.
pub(super) fn image(bytes: &[u8]) -> Option<ContentBlock> {
    let (_, kind) = IMAGES.iter().find(|(start, _)| bytes.starts_with(start))?;
    let mut data = Vec::new();
    Blob::encode_into(bytes, &mut data);
    Some(ContentBlock::image(String::from_utf8(data).ok()?, *kind))
}

pub(super) fn write(call: &Call<'_>) -> Answer {
    let (path, content) = (call.needed("path"), call.needed("content"));
    call.in_agent(|client| client.write_file(path, content.as_bytes(), None))?;
    text(format!("wrote {} bytes", content.len()))
}

pub(super) fn list(call: &Call<'_>) -> Answer {
    let request = ListDirRequest {
        path: call.needed("path").to_owned(),
        depth: 1,
    };
    let listed: ListDirResponse =
        call.in_agent(|client| client.call("filesystem.Filesystem/ListDir", &request))?;
    let count = listed.entries.len();
    let shown = listed.entries.iter().take(MAX_ENTRIES).map(|entry| {
        let mark = if entry.kind == FileType::Directory {
            "/"
        } else {
            ""
        };
        one_line(&format!(
            "{} {:>9} {}{mark}",
            entry.permissions, entry.size, entry.name
        )) + "\n"
    });
    text(format!("{}{count} entries", shown.collect::<String>()))
}

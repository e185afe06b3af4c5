//! Cells of the code interpreter, whose events are lines of JSON.

use std::io;

use envd::{Blob, guest_text};
use rmcp::model::{CallToolResult, ContentBlock};
use serde::Deserialize;
use serde_json::json;

use super::{
    super::{output::Kept, server::Stop},
    Answer, Call, blocks,
    files::{MAX_IMAGE, image},
    marked,
};
use crate::failure::Failure;

/// Port of the interpreter in a guest.
const PORT: u16 = 49_999;
/// Maximum length of an event in bytes: an image in base64.
const MAX_LINE: usize = MAX_IMAGE / 3 * 4 + 4096;
const UNUSABLE: &[u8] = b"[a result that is too large or malformed]\n";

pub(super) fn run(call: &Call<'_>) -> Answer {
    let body = json!({"code": call.needed("code"), "language": call.text("language")}).to_string();
    let json = [("content-type", "application/json")];
    let mut cell = Cell::new(call.sandboxes.limits.max_output, call.stop);
    // The interpreter interrupts a cell whose client disconnects.
    let ran = call
        .sandboxes
        .call(call.sandbox(), PORT, call.limit(), |client| {
            client.receive("POST", "/execute", &json, body.as_bytes(), &mut cell)
        });
    match ran {
        Ok(Ok(_)) => Ok(cell.into_result(None)),
        Err(why) => Ok(cell.into_result(Some(why.to_string()))),
        Ok(Err(answer)) => {
            let (status, why) = (answer.status, String::from_utf8_lossy(&answer.body));
            let why = format!(
                "the interpreter refused the code: {status} {}",
                guest_text(&why)
            );
            Err(Failure::refused(why)
                .with_cure("use `exec`, or start `cube mcp` with --template code-interpreter-v1"))
        }
    }
}

/// An event. Fields of other types are absent.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Event {
    r#type: String,
    text: Option<String>,
    png: Option<String>,
    jpeg: Option<String>,
    markdown: Option<String>,
    html: Option<String>,
    name: String,
    value: String,
    traceback: String,
}

/// The events of a cell, as they arrive.
struct Cell<'a> {
    stop: &'a Stop,
    line: Vec<u8>,
    stdout: Kept,
    stderr: Kept,
    values: Kept,
    errors: Kept,
    images: Vec<ContentBlock>,
    images_size: usize,
}

impl<'a> Cell<'a> {
    fn new(most: u32, stop: &'a Stop) -> Self {
        let kept = || Kept::at_most(most);
        let (stdout, stderr, values, errors) = (kept(), kept(), kept(), kept());
        let (line, images, images_size) = (Vec::new(), Vec::new(), 0);
        Self {
            stop,
            line,
            stdout,
            stderr,
            values,
            errors,
            images,
            images_size,
        }
    }

    fn event(&mut self, line: &[u8]) {
        let event = match serde_json::from_slice::<Event>(line) {
            Ok(event) if line.len() < MAX_LINE => event,
            Ok(_) | Err(_) => return self.values.push(UNUSABLE),
        };
        match event.r#type.as_str() {
            "stdout" => self.stdout.push(event.text.unwrap_or_default().as_bytes()),
            "stderr" => self.stderr.push(event.text.unwrap_or_default().as_bytes()),
            "result" => self.result(event),
            "error" => {
                let Event {
                    name,
                    value,
                    traceback,
                    ..
                } = event;
                self.errors
                    .push(format!("{name}: {value}\n{traceback}").as_bytes());
            }
            _ => {}
        }
    }

    /// Keeps the image of a value, or else its text.
    fn result(&mut self, event: Event) {
        let Some(data) = event.png.or(event.jpeg) else {
            let value = event.text.or(event.markdown).or(event.html);
            self.values.push(value.unwrap_or_default().as_bytes());
            return self.values.push(b"\n");
        };
        let bytes = Blob::decode(data.trim().as_bytes()).unwrap_or_default();
        // Small images count too, so their number is bounded.
        self.images_size += bytes.len() + (64 << 10);
        match image(&bytes).filter(|_| self.images_size <= MAX_IMAGE) {
            Some(image) => self.images.push(image),
            None => self.values.push(UNUSABLE),
        }
    }

    /// `failure`: why the cell did not end.
    fn into_result(self, failure: Option<String>) -> CallToolResult {
        let errors = blocks([self.errors.into_text(), failure.unwrap_or_default()]);
        let texts = [
            self.stdout.into_text(),
            marked(self.stderr),
            self.values.into_text(),
        ];
        let mut result = CallToolResult::success(blocks(texts));
        result.is_error = Some(!errors.is_empty());
        result.content.extend(self.images.into_iter().chain(errors));
        if result.content.is_empty() {
            result.content.push(ContentBlock::text("no output"));
        }
        result
    }
}

impl io::Write for Cell<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.stop.is_set() {
            return Err(io::Error::other("the call was cancelled"));
        }
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let length = end.map_or(bytes.len(), |end| end + 1);
        let room = MAX_LINE.saturating_sub(self.line.len());
        self.line.extend(bytes.iter().take(length.min(room)));
        if end.is_some() {
            let line = std::mem::take(&mut self.line);
            self.event(&line);
        }
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// The blocks of a cell, as JSON, with these events in pieces of this size.
    fn blocks_of(events: &str, piece: usize) -> (Vec<serde_json::Value>, Option<bool>) {
        let stop = Stop::default();
        let mut cell = Cell::new(1024, &stop);
        events
            .as_bytes()
            .chunks(piece)
            .for_each(|piece| cell.write_all(piece).unwrap());
        let result = cell.into_result(None);
        let blocks = result
            .content
            .iter()
            .map(|block| serde_json::to_value(block).unwrap());
        (blocks.collect(), result.is_error)
    }

    #[test]
    fn a_cell_has_output_values_images_and_its_error() {
        let events = concat!(
            "{\"type\":\"number_of_executions\",\"execution_count\":1}\n",
            "{\"type\":\"stdout\",\"text\":\"a\\n\",\"timestamp\":1}\n{\"type\":\"stdout\",\"text\":\"b\"}\n",
            "{\"type\":\"stderr\",\"text\":\"e\"}\n",
            "{\"type\":\"result\",\"text\":\"<Figure>\",\"png\":\"iVBORw0KGgo=\\n\"}\n",
            "{\"type\":\"result\",\"text\":\"3\",\"html\":\"<b>3</b>\"}\n",
            "{\"type\":\"result\",\"png\":\"!\"}\nno json\n",
            "{\"type\":\"error\",\"name\":\"N\",\"value\":\"v\",\"traceback\":\"t\"}\n",
        );
        for piece in [1, 10, events.len()] {
            let (blocks, is_error) = blocks_of(events, piece);
            let texts: Vec<_> = blocks
                .iter()
                .filter_map(|block| block["text"].as_str())
                .collect();
            let unusable = std::str::from_utf8(UNUSABLE).unwrap();
            let values = format!("3\n{unusable}{unusable}");
            assert_eq!(texts, ["a\nb", "stderr:\ne", &values, "N: v\nt"]);
            let image = &blocks[3];
            assert_eq!(
                (&image["data"], &image["mimeType"]),
                (&"iVBORw0KGgo=".into(), &"image/png".into())
            );
            assert_eq!(is_error, Some(true));
        }
        assert_eq!(blocks_of("", 1).0[0]["text"], "no output");
    }

    #[test]
    fn a_result_of_any_size_takes_bounded_memory() {
        let stop = Stop::default();
        let mut cell = Cell::new(1024, &stop);
        for _ in 0..MAX_LINE / 1024 + 2 {
            cell.write_all(&[b' '; 1024]).unwrap();
        }
        assert_eq!(cell.line.len(), MAX_LINE);
        cell.write_all(b"{}\n").unwrap();
        let image = b"\x89PNG\r\n\x1a\n".repeat(MAX_IMAGE / 16);
        let mut data = Vec::new();
        Blob::encode_into(&image, &mut data);
        let line = json!({"type": "result", "png": String::from_utf8(data).unwrap()}).to_string();
        for _ in 0..4 {
            cell.write_all(line.as_bytes()).unwrap();
            cell.write_all(b"\n").unwrap();
        }
        assert_eq!(cell.images.len(), 1);
        let text = cell.into_result(None).content.swap_remove(0);
        let text = serde_json::to_string(&text).unwrap();
        assert_eq!(text.matches("too large or malformed").count(), 4, "{text}");
    }

    #[test]
    fn a_cancelled_cell_takes_no_more_events() {
        let stop = Stop::default();
        stop.set();
        assert!(Cell::new(1024, &stop).write_all(b"{}\n").is_err());
    }
}

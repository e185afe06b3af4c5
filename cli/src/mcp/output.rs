//! Bounded output.

use std::collections::VecDeque;

/// The beginning and the end of an output.
pub(super) struct Kept {
    /// Maximum size of either part in bytes.
    half: usize,
    head: Vec<u8>,
    tail: VecDeque<u8>,
    total: usize,
}

impl Kept {
    pub(super) fn at_most(bytes: u32) -> Self {
        Self {
            half: bytes as usize / 2,
            head: Vec::new(),
            tail: VecDeque::new(),
            total: 0,
        }
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.total = self.total.saturating_add(bytes.len());
        let room = (self.half - self.head.len()).min(bytes.len());
        let (head, rest) = bytes.split_at(room);
        self.head.extend_from_slice(head);
        let surplus = rest.len().saturating_sub(self.half);
        self.tail.extend(rest.iter().skip(surplus));
        let surplus = self.tail.len().saturating_sub(self.half);
        self.tail.drain(..surplus);
    }

    /// The output as text. Invalid UTF-8 is replaced.
    pub(super) fn into_text(mut self) -> String {
        let tail = Vec::from(self.tail);
        let left_out = self.total - self.head.len() - tail.len();
        if left_out > 0 {
            let note = format!("\n[{left_out} bytes left out]\n");
            self.head.extend_from_slice(note.as_bytes());
        }
        self.head.extend_from_slice(&tail);
        String::from_utf8_lossy(&self.head).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_output_keeps_its_beginning_and_its_end() {
        for piece in [1, 3, 7, 100] {
            let mut kept = Kept::at_most(20);
            let all: Vec<u8> = (b'a'..=b'z').collect();
            all.chunks(piece).for_each(|piece| kept.push(piece));
            let text = kept.into_text();
            assert_eq!(
                text, "abcdefghij\n[6 bytes left out]\nqrstuvwxyz",
                "{piece}"
            );
        }
    }

    #[test]
    fn a_whole_output_stays_as_it_is() {
        let mut kept = Kept::at_most(6);
        kept.push("aéöb".as_bytes());
        assert_eq!(kept.into_text(), "aéöb");
        assert_eq!(Kept::at_most(6).into_text(), "");
    }
}

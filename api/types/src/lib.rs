//! Wire types shared by the guest agent, the API server and the harness. Types, codecs and one blocking
//! client; no server, no async runtime.
//!
//! [`envd`] is what is spoken with the agent inside a guest, [`rest`] what is spoken with the API server.

pub mod envd;
mod guest_text;
pub mod rest;

pub use guest_text::{GUEST_TEXT_MAX, guest_text};

//! Builds of templates: from an image or a template and a list of steps to a template with memory.

pub mod cancel;
mod command;
pub mod grant;
mod guest;
mod key;
pub mod log;
mod output;
pub mod page;
pub mod plan;
pub mod request;
mod settings;
mod steps;
pub mod text;
pub mod uploads;

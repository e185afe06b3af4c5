//! Layers, manifests, configs, references and challenges of registries.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| oci_image::fuzz::image(bytes));

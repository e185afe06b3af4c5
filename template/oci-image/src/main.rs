//! `cube-image`: converts one image in a confined process. Started by `oci_image::Converter`, with a socket as standard
//! input.

fn main() -> std::process::ExitCode {
    oci_image::worker::main()
}

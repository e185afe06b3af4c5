//! `cube-verify`, the program behind `cube-bench verify`.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main().into()
}

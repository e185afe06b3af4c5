"""Converts the output of IPython's formatters to results for clients."""

import base64
import sys

from IPython.core.formatters import BaseFormatter, JSONFormatter
from traitlets import ObjectName, Unicode

from .cells import strip_quotes

# Keys of MIME types in results. Other types go into `extra` under their own names.
KEYS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}
# Limit below the 64 MiB of a line on the control socket.
MAX_EVENT = 60 << 20


def event(data, main):
    """The event of a result with content by MIME type."""
    fields, extra = {"type": "result"}, {}
    for kind, content in data.items():
        if isinstance(content, tuple):
            # Content with metadata, which is dropped.
            content = content[0]
        if isinstance(content, (bytes, bytearray)):
            content = base64.b64encode(content).decode()
        if content is None:
            continue
        if kind == "text/plain":
            content = strip_quotes(str(content))
        key = KEYS.get(kind)
        if key is not None:
            fields[key] = content
        else:
            extra[kind] = content
    if extra:
        fields["extra"] = extra
    fields["is_main_result"] = main
    line = encode(fields)
    if len(line) > MAX_EVENT:
        text = "<a result of %d bytes, which is more than can be sent>" % len(line)
        line = encode({"type": "result", "text": text, "is_main_result": main})
    return line


def encode(fields):
    import orjson

    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return orjson.dumps(fields, default=plain, option=options).decode()


def plain(thing):
    """Converts values that JSON cannot represent."""
    if hasattr(thing, "isoformat"):
        return thing.isoformat()
    if hasattr(thing, "tolist"):
        return thing.tolist()
    return str(thing)


def as_json(thing):
    """The list or dictionary if it can be represented in JSON, otherwise None."""
    import orjson

    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        orjson.dumps(thing, option=options)
    except TypeError:
        return None
    return thing


class DataFormatter(BaseFormatter):
    """Converts data frames to lists by column."""

    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = (dict, str)

    def __call__(self, thing):
        # Without pandas loaded, the value cannot be a data frame.
        pandas = sys.modules.get("pandas")
        if pandas is None or not isinstance(thing, pandas.DataFrame):
            return super().__call__(thing)
        return thing.to_dict(orient="list")


class ChartFormatter(BaseFormatter):
    """Converts figures of matplotlib to the plotted data."""

    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = (dict, str)

    def __call__(self, thing):
        figure = sys.modules.get("matplotlib.figure")
        if figure is None or not isinstance(thing, figure.Figure):
            return super().__call__(thing)
        import warnings

        from e2b_charts import chart_figure_to_dict

        try:
            with warnings.catch_warnings():
                # Suppresses warnings about numpy's types, which are not caused by user code.
                warnings.simplefilter("ignore")
                return chart_figure_to_dict(thing) or None
        except Exception:  # noqa: BLE001 - a figure that cannot be read is still shown as an image
            return None


class JsonFormatter(JSONFormatter):
    """Adds a JSON form to lists and dictionaries that can be represented."""

    def __call__(self, thing):
        return as_json(thing) if type(thing) in (list, dict) else super().__call__(thing)


def register(shell):
    """Registers these formatters with IPython."""
    display_formatter = shell.display_formatter
    formatters = display_formatter.formatters
    formatters["e2b/data"] = DataFormatter(parent=display_formatter)
    formatters["e2b/chart"] = ChartFormatter(parent=display_formatter)
    formatters["application/json"] = JsonFormatter(parent=display_formatter)
    try:
        show_saved_images()
    except ImportError:
        # Without Pillow there are no images.
        pass


def show_saved_images():
    """Also shows images that are saved to a file, as official sandboxes do."""
    from IPython.display import display
    from PIL.Image import Image

    save = Image.save

    def save_and_show(image, fp, format=None, **parameters):
        if isinstance(fp, str):
            display(image)
        save(image, fp, format, **parameters)

    Image.save = save_and_show

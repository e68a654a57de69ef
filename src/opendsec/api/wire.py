# SPDX-License-Identifier: Apache-2.0
"""JSON in and out. Decoding names the field that is wrong; nothing here does I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from opendsec.api.errors import ErrorBody, Internal, InvalidRequest, OpenDSecError, from_body

API_GENERATION = 1
MAX_BODY_BYTES = 96 << 20  # of a JSON request: the largest stdin in base64, and room

T = TypeVar("T", bound=msgspec.Struct)
_encoder = msgspec.json.Encoder()
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<where>.*)`)?$", re.DOTALL)


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorBody


def encode(value: msgspec.Struct) -> bytes:
    """JSON of a struct; bytes fields as base64."""
    return _encoder.encode(value)


_decoders: dict[type[msgspec.Struct], msgspec.json.Decoder[msgspec.Struct]] = {}


def _decode(data: bytes, kind: type[T]) -> T:
    decoder = _decoders.get(kind)
    if decoder is None:  # building one walks the whole type: keep it
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    value = decoder.decode(data)
    assert isinstance(value, kind)
    return value


def decode(data: bytes, kind: type[T]) -> T:
    """`data` as `kind`. Raises InvalidRequest with the field where it does not fit."""
    try:
        return _decode(data, kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"is not valid JSON: {error}", field="body") from None


def convert(fields: Mapping[str, object], kind: type[T]) -> T:
    """`kind` made of its `fields` as a Python caller gave them, their types verified. Raises InvalidRequest with the field."""
    try:
        return msgspec.convert(fields, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: msgspec.ValidationError) -> InvalidRequest:
    match = _WHERE.match(str(error))
    assert match is not None  # the pattern matches any text
    return InvalidRequest(match["what"], field=match["where"] or "body")


def encode_error(error: OpenDSecError) -> bytes:
    return _encoder.encode(ErrorResponse(error.body()))


def decode_error(status: int, data: bytes) -> OpenDSecError:
    """The exception in an error response; a body that is none of ours becomes `Internal`."""
    try:
        return from_body(_decode(data, ErrorResponse).error)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Internal(f"the edge answered with status {status} and no error body", data={"status": status})

# SPDX-License-Identifier: Apache-2.0
"""Images to and from remote stores: as the layers that they are, so what is there already is not sent again.

A push sends, of each layer that is missing, first its files, then its record, and the image's record after all layers. Until then
nothing points to what was sent. A pull takes the same way back; with `lazy` it brings the metadata and the chunk tables, and `origin.json`
says where the rest is. What lies where: `remote.layout`.
"""

from opendsec.images.remote.pull import pull_image
from opendsec.images.remote.push import push_image

__all__ = ["pull_image", "push_image"]

"""Mistakes in image preprocessing and placement (numerics.md 11)."""

from conformance.faults.fault import Fault
from conformance.faults.patches import Edit, Replace

V = "vision"
PLAN, LARGEST, FIT = "images.image_resize_plan", "images.largest_canvas", "images.fit"
PATCHES, SPANS, MERGE = "images.image_patches", "images.image_spans", "images.merge_images"
SCALED = "(canvas.float() / 255 - 0.5) / 0.5"
SPAN = "[START, *([IMAGE] * columns + [NEWLINE]) * rows, END]"
ROOM = "room = config.vision_max_n_token - 2"
CORNER = "round((canvas[0] - height) * 0.5), round((canvas[1] - width) * 0.5)"
STRETCH = "limit is not None and width >= limit * height"

FAULTS: tuple[Fault, ...] = (
    Fault(
        V,
        "sides-rounded-down",
        "image-plan-rounding",
        "Sides are cut to whole patches.",
        Edit(
            PLAN,
            "math.ceil(tall / patch) * patch, math.ceil(wide / patch) * patch",
            "max(1, int(tall / patch)) * patch, max(1, int(wide / patch)) * patch",
        ),
    ),
    Fault(
        V,
        "sides-rounded-to-cells",
        "image-plan-rounding",
        "Sides are rounded up to whole cells of the aligner.",
        Edit(
            PLAN,
            "patch = config.vision_patch_size",
            "patch = config.vision_patch_size * config.vision_downsample_ratio",
        ),
    ),
    Fault(
        V,
        "sides-swapped",
        "image-plan-sides",
        "Width and height are exchanged.",
        Edit(PLAN, "tall: float = height", "tall: float = width\n    wide = height"),
    ),
    Fault(
        V,
        "small-images-kept",
        "image-plan-growth",
        "Small images do not grow.",
        Edit(PLAN, "if wide * tall < config.vision_min_pixels:", "if wide * tall < 0:"),
    ),
    Fault(
        V,
        "growth-without-root",
        "image-plan-growth",
        "Both sides grow by the ratio of the pixels.",
        Edit(PLAN, "math.sqrt(config.vision_min_pixels / (wide * tall))", "config.vision_min_pixels / (wide * tall)"),
    ),
    Fault(
        V,
        "growth-rounded-up",
        "image-plan-growth",
        "Grown sides are rounded up.",
        Edit(PLAN, "int(wide * growth), int(tall * growth)", "math.ceil(wide * growth), math.ceil(tall * growth)"),
    ),
    Fault(
        V,
        "newlines-not-counted",
        "image-plan-limit",
        "A span's length leaves the newlines out.",
        Edit("images.span_length", "rows * (columns + 1) + 2", "rows * columns + 2"),
    ),
    Fault(
        V,
        "delimiters-not-counted",
        "image-plan-limit",
        "The limit does not count start and end.",
        Edit(LARGEST, ROOM, "room = config.vision_max_n_token"),
    ),
    Fault(
        V,
        "limit-as-area",
        "image-plan-limit",
        "Too large an image is shrunk to the square root of the limit.",
        Edit(LARGEST, "columns = math.sqrt(room / aspect + 0.25) - 0.5", "columns = math.sqrt(room / aspect)"),
    ),
    Fault(
        V,
        "shrunk-to-whole-cells",
        "image-plan-limit",
        "A shrunk canvas is cut to whole cells.",
        Edit(
            LARGEST,
            "math.floor(height * shrink / patch) * patch, math.floor(width * shrink / patch) * patch",
            "math.floor(height * shrink / cell) * cell, math.floor(width * shrink / cell) * cell",
        ),
    ),
    Fault(
        V,
        "limit-off-by-one",
        "image-plan-limit",
        "A span of exactly the limit is shrunk.",
        Edit(PLAN, "plan.tokens <= config.vision_max_n_token", "plan.tokens < config.vision_max_n_token"),
    ),
    Fault(
        V,
        "tall-strip-unlimited",
        "image-plan-strip",
        "A column has a row for every token.",
        Edit(LARGEST, "return room // 2 * cell, cell", "return room * cell, cell"),
    ),
    Fault(
        V,
        "wide-strip-off-by-one",
        "image-plan-strip",
        "The newline of a single row is forgotten.",
        Edit(LARGEST, "(room - 1) * cell", "room * cell"),
    ),
    Fault(
        V,
        "plan-in-fp32",
        "image-plan-precision",
        "The shrinking factor is an fp32 number.",
        Edit(
            LARGEST,
            "return math.floor(height * shrink",
            "shrink = float(torch.tensor(shrink, dtype=torch.float32))\n    return math.floor(height * shrink",
        ),
    ),
    Fault(
        V,
        "plan-rounded-safely",
        "image-plan-precision",
        "A tiny number is added before a side is cut to whole patches.",
        Edit(LARGEST, "shrink = min(", "shrink = (1 + 1e-9) * min("),
    ),
    Fault(
        V,
        "width-not-limited",
        "image-plan-width",
        "The limit of the width is ignored.",
        Edit(PLAN, "wide = tall * config.vision_max_wh_ratio", "pass"),
    ),
    Fault(
        V,
        "height-limited",
        "image-plan-width",
        "Heights are limited like widths.",
        Edit(
            PLAN,
            "    patch = config.vision_patch_size",
            "    if config.vision_max_wh_ratio is not None:\n"
            "        tall = min(tall, wide * config.vision_max_wh_ratio)\n"
            "    patch = config.vision_patch_size",
        ),
    ),
    Fault(
        V,
        "mean-and-deviation-of-another-tower",
        "image-normalisation",
        "Pixels are scaled with another tower's mean and deviation.",
        Edit(PATCHES, SCALED, "(canvas.float() / 255 - 0.481) / 0.269"),
    ),
    Fault(
        V,
        "divided-by-256",
        "image-normalisation",
        "Pixels are divided by 256.",
        Edit(PATCHES, "canvas.float() / 255", "canvas.float() / 256"),
    ),
    Fault(
        V,
        "not-centred",
        "image-normalisation",
        "Pixels are between 0 and 1.",
        Edit(PATCHES, SCALED, "canvas.float() / 255"),
    ),
    Fault(
        V,
        "normalised-in-bf16",
        "image-normalisation",
        "Pixels are rounded to bf16 before the mean is subtracted.",
        Edit(PATCHES, "canvas.float() / 255", "arithmetic.as_bf16(canvas.float() / 255)"),
    ),
    Fault(
        V,
        "patches-by-column",
        "patch-order",
        "Patches follow one another column by column.",
        Edit(PATCHES, "permute(0, 2, 4, 1, 3)", "permute(2, 0, 4, 1, 3)"),
    ),
    Fault(
        V,
        "pixels-transposed",
        "patch-order",
        "Pixels inside a patch are column by column.",
        Edit(PATCHES, "permute(0, 2, 4, 1, 3)", "permute(0, 2, 4, 3, 1)"),
    ),
    Fault(
        V,
        "blue-first",
        "patch-channels",
        "Channels are blue, green, red.",
        Edit(PATCHES, SCALED, f"({SCALED}).flip(-1)"),
    ),
    Fault(
        V,
        "channels-innermost",
        "patch-channels",
        "A patch keeps the channels of a pixel side by side.",
        Edit(
            PATCHES,
            "patches.permute(0, 2, 4, 1, 3).flatten(0, 1)",
            "patches.permute(0, 2, 1, 3, 4).reshape(-1, 3, size, size)",
        ),
    ),
    Fault(V, "black-padding", "image-padding", "The canvas is black.", Replace("images.GREY", 0)),
    Fault(V, "grey-of-128", "image-padding", "The canvas is grey 128.", Replace("images.GREY", 128)),
    Fault(
        V,
        "picture-in-the-corner",
        "image-padding-side",
        "All padding is at the right and below.",
        Edit(FIT, CORNER, "0, 0"),
    ),
    Fault(
        V,
        "half-rounded-down",
        "image-padding-side",
        "Half a pixel is cut off.",
        Edit(FIT, CORNER, "(canvas[0] - height) // 2, (canvas[1] - width) // 2"),
    ),
    Fault(
        V,
        "half-rounded-up",
        "image-padding-side",
        "Half a pixel is rounded up.",
        Edit(FIT, CORNER, "(canvas[0] - height + 1) // 2, (canvas[1] - width + 1) // 2"),
    ),
    Fault(
        V,
        "bilinear",
        "image-filter",
        "Pixels are resampled bilinearly.",
        Edit("images.resample", "Image.Resampling.BICUBIC", "Image.Resampling.BILINEAR"),
    ),
    Fault(
        V,
        "bicubic-of-another-library",
        "image-filter",
        "Another bicubic filter, of coefficient -3/4 and not widened.",
        Edit(
            "images.resample",
            "from PIL import Image\n",
            "planes = pixels.permute(2, 0, 1).float()[None]\n"
            '    planes = torch.nn.functional.interpolate(planes, (height, width), mode="bicubic")[0]\n'
            "    return planes.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0)\n",
        ),
    ),
    Fault(
        V,
        "panorama-padded",
        "image-stretch",
        "An image beyond the limit keeps its aspect.",
        Edit(PATCHES, STRETCH, "False"),
    ),
    Fault(
        V,
        "stretched-beyond-the-limit-only",
        "image-stretch",
        "An image exactly at the limit keeps its aspect.",
        Edit(PATCHES, "width >= limit", "width > limit"),
    ),
    Fault(V, "always-stretched", "image-stretch", "Every image is stretched.", Edit(PATCHES, STRETCH, "True")),
    Fault(
        V,
        "newline-missing",
        "image-span-layout",
        "Rows of cells follow one another without newlines.",
        Edit(SPANS, SPAN, "[START, *[IMAGE] * columns * rows, END]"),
    ),
    Fault(
        V,
        "last-newline-missing",
        "image-span-layout",
        "No newline stands before the end.",
        Edit(SPANS, SPAN, "[START, *(([IMAGE] * columns + [NEWLINE]) * rows)[:-1], END]"),
    ),
    Fault(
        V,
        "newline-before-the-row",
        "image-span-layout",
        "A newline stands before each row.",
        Edit(SPANS, SPAN, "[START, *([NEWLINE] + [IMAGE] * columns) * rows, END]"),
    ),
    Fault(
        V,
        "start-and-end-swapped",
        "image-span-layout",
        "Start and end are exchanged.",
        Edit(SPANS, SPAN, SPAN.replace("START", "STOP").replace("END", "START").replace("STOP", "END")),
    ),
    Fault(
        V,
        "odd-grid-cut",
        "image-span-grid",
        "Cells that are not full get no place.",
        Edit(
            SPANS, "math.ceil(side / config.vision_downsample_ratio)", "max(1, side // config.vision_downsample_ratio)"
        ),
    ),
    Fault(
        V,
        "span-transposed",
        "image-span-grid",
        "Rows and columns of the grid are exchanged.",
        Edit(SPANS, "rows, columns = (", "columns, rows = ("),
    ),
    Fault(
        V,
        "grids-reversed",
        "image-order",
        "The last image comes first.",
        Edit(SPANS, "iter(patch_grids.tolist())", "iter(patch_grids.flip(0).tolist())"),
    ),
    Fault(
        V,
        "features-in-every-place",
        "image-merge-place",
        "Features are laid over delimiters too, one after the other.",
        Edit(
            MERGE,
            "merged[token_types == IMAGE] = features",
            "places = torch.nonzero(token_types >= 0)[: len(features)]\n    merged[tuple(places.mT)] = features",
        ),
    ),
    Fault(
        V,
        "features-shifted",
        "image-merge-place",
        "Features begin one place late.",
        Edit(MERGE, "= features", "= features.roll(1, 0)"),
    ),
    Fault(
        V,
        "delimiters-not-learned",
        "image-delimiters",
        "Delimiters keep the embedding of the image token.",
        Edit(MERGE, "merged[token_types == token_type] = weights[name]", "pass"),
    ),
    Fault(
        V,
        "end-is-newline",
        "image-delimiters",
        "The end of a span gets the row of a newline.",
        Edit(MERGE, '(END, "image_end")', '(END, "image_newline")'),
    ),
    Fault(
        V,
        "image-mask-remembered",
        "image-remembered",
        "The mask of the last image serves every request that brings none.",
        Edit(
            "model.Model.step",
            "config = self.config\n",
            "config = self.config\n"
            '    known = arithmetic.GLOBAL.get("image")\n'
            "    if image_mask is None and known is not None and known.shape[1] >= input_ids.shape[1]:\n"
            "        image_mask = known[:1, : input_ids.shape[1]].expand(len(input_ids), -1)\n"
            "    elif image_mask is not None and image_mask.any():\n"
            '        arithmetic.GLOBAL["image"] = image_mask\n',
        ),
    ),
)
